"""The Claude Managed Agents face: schemas, codec and routes. Translates; decides nothing."""
