-- Submit once asks what is known of one request's response, not of one process.
-- Ids of processes match no request: what was recorded before is judged as after a crash.
alter table submission rename column process to request_id;
