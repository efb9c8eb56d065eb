import sys
exec(open("tests/fuzz/x_lying.py").read().split("for seed in")[0].replace("int(sys.argv[2])","0"))
seed=int(sys.argv[1]); liar=Liar(seed, NAMES); r=liar.random
kit=HeadKit(); kit.cluster(2); kit.launch("g",[0,1]); kit.ready("a:n0","g-0")
for n in range(4):
    kind=r.choice(typing.get_args(Body))
    env=b"\x82\xa4type\xa3not\xa4body"+liar.say(kind)
    try: body=codec.decode(env).body
    except RemoteWireError: continue
    if isinstance(body,(AgentHello,ClientHello)): body=msgspec.structs.replace(body, protocol=PROTOCOL, version="1.0")
    peer=r.choice(["a:n0","d1","x"])
    ask=r.random()<.6
    print(n, peer, ask, repr(body)[:300])
    (kit.ask if ask else kit.tell)(peer, body)
    end=kit.now+15; k=0
    while kit.head.next_deadline()<=end:
        d=kit.head.next_deadline(); kit.now=d; k+=1
        if 2000<k<2006:
            print("  deadline", d, {n:getattr(t,"next_deadline")() for n,t in vars(kit.head._tables).items() if hasattr(t,"next_deadline") and n!="robots"})
        if k>2010: break
        kit.out=kit._keep(kit.head.handle(Tick(), kit.now, kit.wall))
    if k>2010: break
    kit.now=end
