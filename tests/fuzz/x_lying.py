import sys, math, traceback, collections, time, signal
sys.path[:0] = ["tests/head", "tests/fuzz"]
from head_kit import HeadKit
from lies import Liar
import typing, msgspec
from rlinf_actors.wire import codec
from rlinf_actors.wire.messages import Body, Request, Notice
from rlinf_actors.wire.session import AgentHello, ClientHello
from rlinf_actors.errors import RemoteWireError
from rlinf_actors.head.commands import *
from rlinf_actors.wire.protocol import PROTOCOL
NAMES=("ns","g","d1","n0","n1","n0-1","g-0","g-1","driver","worker","127.0.0.1","host-n0")
found=collections.Counter(); ex={}
def hang(*a): raise RuntimeError("hang")
signal.signal(signal.SIGALRM, hang)
t0=time.time(); ok=0
for seed in range(int(sys.argv[1]), int(sys.argv[2])):
    liar=Liar(seed, NAMES); r=liar.random
    kit=HeadKit(); kit.cluster(2); kit.launch("g",[0,1]); kit.ready("a:n0","g-0")
    said=[]
    signal.alarm(3)
    try:
        for n in range(4):
            kind=r.choice(typing.get_args(Body))
            env=b"\x82\xa4type\xa3not\xa4body"+liar.say(kind)
            try: body=codec.decode(env).body
            except RemoteWireError: continue
            if isinstance(body,(AgentHello,ClientHello)): body=msgspec.structs.replace(body, protocol=PROTOCOL, version="1.0")
            ok+=1
            said.append(body)
            peer=r.choice(["a:n0","d1","x"])
            (kit.ask if r.random()<.6 else kit.tell)(peer, body)
            for c in kit.out:
                if isinstance(c,(Notify,Answer)): codec.decode(codec.encode(Notice(c.body)))
            assert not math.isnan(kit.head.next_deadline()), "nan deadline"
            assert kit.head.next_deadline() > -1e17, "-inf deadline"
            kit.wait(15)
            for c in kit.out:
                if isinstance(c,(Notify,Answer)): codec.decode(codec.encode(Notice(c.body)))
        codec.encode(Notice(kit.head.status(kit.now)))
    except Exception as e:
        signal.alarm(0)
        tb=traceback.extract_tb(e.__traceback__)
        at=[f for f in tb if "/rlinf_actors/" in f.filename]
        where=f"{at[-1].filename.split('/')[-1]}:{at[-1].lineno}" if at else f"test:{tb[-1].lineno}"
        k=(type(e).__name__, str(e)[:80], where, type(said[-1] if said else 0).__name__)
        found[k]+=1; ex.setdefault(k,(seed,said[-1:]))
    signal.alarm(0)
for k,v in found.most_common(40): print(v,k, ex[k][0]); print("     ", repr(ex[k][1])[:600])
print(ok, "said", time.time()-t0)
