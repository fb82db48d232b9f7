import time
from tests.cases.conftest import *
from tests.cases.driving import *
from tests.cases.test_streams import *
async def test_probe(site):
    session = await site.open()
    await session.send(INTERRUPT)
    t=time.monotonic()
    for _ in range(50): await session.send(INTERRUPT)
    t2=time.monotonic(); print("send", (t2-t)/50)
    for _ in range(50): await session.http.get(session.path+"/events?order=desc&limit=1")
    t3=time.monotonic(); print("list", (t3-t2)/50)
    for _ in range(50):
        async with session.http.stream("GET", session.path + "/events/stream") as r: pass
    t4=time.monotonic(); print("open", (t4-t3)/50)
    for _ in range(50):
        async with session.http.stream("GET", session.path + "/events/stream",headers={"last-event-id":"1.0"}) as r:
            await anext(read_frames(r))
    t5=time.monotonic(); print("open by id", (t5-t4)/50)
