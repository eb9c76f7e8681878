"""Jobs in typical states, as messages of the server."""

from rdzv.v1 import rdzv_pb2 as pb

TRACEBACK = """\
Traceback (most recent call last):
  File "/home/ada/train.py", line 212, in <module>
    main()
  File "/home/ada/train.py", line 188, in main
    loss.backward()
torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
"""

OUT_OF_MEMORY = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def joining() -> pb.JobStatus:
    """Three nodes are needed, two are there, the third was lost."""
    return pb.JobStatus(
        rdzv_id="gpt-small",
        run="5f3a9c21",
        run_number=1,
        state="joining",
        reason=pb.Reason(
            headline="waiting for 1 more node (have 2 of 3:4)",
            then="gives up in",
            left_ms=588_000,
            items=[pb.ReasonItem(who="n7", state="lost", cause="lease expired")],
        ),
        min_nodes=3,
        max_nodes=4,
        restarts=0,
        max_restarts=3,
        state_age_ms=42_000,
        run_age_ms=42_000,
        nodes=[
            _node("n1", "waiting", age_ms=42_000),
            _node("n2", "waiting", age_ms=40_500),
            _node("n7", "lost", age_ms=12_000),
        ],
    )


def give_reason(
    job: pb.JobStatus, headline: str, then: str = "", left_ms: int | None = None
) -> None:
    """Give a job another reason, without items."""
    job.reason.CopyFrom(pb.Reason(headline=headline, then=then, left_ms=left_ms))


def running() -> pb.JobStatus:
    """All is well: three nodes of eight workers, one restart spent in the past."""
    nodes = [
        _node(f"n{i + 1}", "seated", age_ms=7_500_000, group_rank=i, rank_first=8 * i)
        for i in range(3)
    ]
    return pb.JobStatus(
        rdzv_id="gpt-small",
        run="5f3a9c21",
        run_number=1,
        state="running",
        reason=pb.Reason(headline="3 nodes and 24 workers run round 2"),
        round=2,
        min_nodes=3,
        max_nodes=4,
        world_size=24,
        restarts=1,
        max_restarts=3,
        state_age_ms=7_500_000,
        run_age_ms=90_000_000,
        master_addr="10.0.0.1",
        master_port=29511,
        nodes=nodes,
    )


def failed() -> pb.JobStatus:
    """The budget is spent: an exception on n3, which broke its peers' collectives."""
    nodes = [
        _node(f"n{i + 1}", "left", age_ms=250_000, group_rank=i, rank_first=8 * i) for i in range(3)
    ]
    failures = [
        pb.WorkerFailure(
            node_id="n3",
            address="10.0.0.3",
            local_rank=1,
            rank=17,
            pid=4711,
            exit_code=1,
            message=OUT_OF_MEMORY,
            traceback=TRACEBACK,
            age_ms=252_000,
        ),
        pb.WorkerFailure(
            node_id="n1",
            address="10.0.0.1",
            local_rank=3,
            rank=3,
            pid=812,
            signal=6,
            message="ended by signal 6 (SIGABRT)",
        ),
    ]
    spent = "a worker failed and all 3 restarts are spent"
    return pb.JobStatus(
        rdzv_id="gpt-small",
        run="5f3a9c21",
        run_number=2,
        state="failed",
        reason=pb.Reason(headline=f"{spent}: RANK 17 on n3: {OUT_OF_MEMORY}"),
        round=5,
        min_nodes=3,
        max_nodes=4,
        world_size=24,
        restarts=3,
        max_restarts=3,
        state_age_ms=250_000,
        run_age_ms=90_000_000,
        master_addr="10.0.0.1",
        master_port=29511,
        nodes=nodes,
        last_failure=pb.LastFailure(age_ms=252_000, root_cause=failures[0], others=failures[1:]),
    )


def large() -> pb.JobStatus:
    """Five hundred nodes, a few of which, anywhere in the list, are not seated."""
    nodes = [
        _node(f"node-{i:03d}", "seated", age_ms=600_000, group_rank=i, rank_first=8 * i)
        for i in range(496)
    ]
    nodes[123].state = "away"
    nodes[123].state_age_ms = 1_800
    nodes += [
        _node("node-901", "spare", age_ms=590_000),
        _node("node-902", "spare", age_ms=580_000),
        _node("node-903", "left", age_ms=610_000),
        _node("node-904", "lost", age_ms=601_000),
    ]
    cause, then = "its stream ended", "its seat is kept for"
    items = [
        pb.ReasonItem(who="node-123", state="away", cause=cause, then=then, left_ms=3_200),
        pb.ReasonItem(who="node-903", state="left", cause="signal 15 (SIGTERM)"),
        pb.ReasonItem(who="node-904", state="lost", cause="lease expired"),
    ]
    return pb.JobStatus(
        rdzv_id="llm-70b",
        run="0d9be0a7",
        run_number=1,
        state="running",
        reason=pb.Reason(headline="496 nodes and 3968 workers run round 7", items=items),
        round=7,
        min_nodes=400,
        max_nodes=496,
        world_size=3968,
        restarts=0,
        max_restarts=0,
        state_age_ms=600_000,
        run_age_ms=200_000_000,
        master_addr="10.0.0.1",
        master_port=29511,
        nodes=nodes,
    )


def watched() -> pb.JobStatus:
    """A job of torch's own rendezvous; only the data that its nodes store is known."""
    nodes = [
        pb.NodeStatus(
            node_id=f"h{i}_{4711 + i}_0",
            state="seated" if i < 2 else "waiting",
            group_rank=i if i < 2 else None,
            address=f"h{i}",
            state_age_ms=62_000 - 20_000 * i,
        )
        for i in range(3)
    ]
    return pb.JobStatus(
        rdzv_id="tutorial",
        state="running",
        reason=pb.Reason(headline="2 nodes run round 0; waiting until they restart: h2_4713_0"),
        round=0,
        state_age_ms=62_000,
        run_age_ms=65_000,
        nodes=nodes,
        backend="c10d",
    )


def history() -> list[pb.Event]:
    """Three events of one second."""
    texts = (
        ("NodeLost", "n3 was lost: lease expired"),
        ("RoundEnded", "round 2 ended: n3 was lost"),
        ("NodeStopped", "n1 has stopped round 2"),
    )
    return [
        pb.Event(unix_ms=1_700_000_000_004 + 300 * i, run="5f3a", name=name, text=text)
        for i, (name, text) in enumerate(texts)
    ]


def nodes() -> list[pb.Node]:
    """One node that trains, one that is free, one that was told to accept no more, a rdzvrun."""
    gib = 1 << 30
    h100 = [pb.Gpu(uuid=f"GPU-{i}", name="NVIDIA H100", memory_bytes=80 * gib) for i in range(8)]
    labels = [pb.Label(name="gpu", value="h100"), pb.Label(name="zone", value="a")]
    big = pb.Resources(
        cpus=96,
        memory_bytes=1_024 * gib,
        gpus=h100,
        labels=labels,
        capacity=4,
        topology="rack-1",
    )
    return [
        pb.Node(
            node_id="gpu-10",
            state="connected",
            state_age_ms=7_500_000,
            program="rdzv-agent",
            address="10.0.0.10",
            agent_version="0.1.0",
            resources=big,
            gpus_free=8,
        ),
        pb.Node(
            node_id="gpu-2",
            state="connected",
            state_age_ms=90_000_000,
            program="rdzv-agent",
            address="10.0.0.2",
            agent_version="0.1.0",
            resources=big,
            gpus_free=2,
            without_it="llm would have 1 of the 2 nodes that it needs, and 0 others free for it: "
            "it stops until others are free",
            jobs=[
                pb.NodeJob(rdzv_id="llm", gpus=4, state="seated"),
                pb.NodeJob(rdzv_id="eval", gpus=2, state="placed"),
            ],
        ),
        pb.Node(
            node_id="gpu-3",
            state="away",
            state_age_ms=4_000,
            program="rdzv-agent",
            address="10.0.0.3",
            agent_version="0.1.0",
            resources=pb.Resources(cpus=8, memory_bytes=1536 << 20, capacity=1),
            gpus_free=0,
            cordoned=True,
            cordon_reason="by ada at head-1: its disk fails",
            cordon_age_ms=86_400_000,
            jobs=[pb.NodeJob(rdzv_id="bert", state="holding")],
        ),
        pb.Node(
            node_id="login-1-4711",
            state="connected",
            state_age_ms=60_000,
            program="rdzvrun",
            address="10.0.0.1",
            jobs=[pb.NodeJob(rdzv_id=f"j{i}", state="seated") for i in range(5)],
        ),
        pb.Node(
            node_id="old-7",
            state="gone",
            cordoned=True,
            cordon_age_ms=180_000_000,
        ),
    ]


def submitted() -> pb.JobStatus:
    """A job of which one node has joined, one is awaited, and one has declined."""
    status = joining()
    del status.nodes[1:]
    status.submission.CopyFrom(
        pb.Submission(
            submitted_by="ada at head-1",
            submitter="ada",
            age_ms=300_000,
            args=["--nnodes=3:4", "--", "train me.py", "--lr", "1"],
            env_names=["TOKEN", "HF_HOME"],
            chdir="/home/ada/gpt",
            labels=[pb.Label(name="gpu", value="h100")],
            priority=5,
            gpus_per_node=8,
            placed=["n1", "n4"],
            jobs_before=2,
            declined=[pb.DeclinedNode(node_id="n9", reason="no folder /home/ada/gpt there")],
        )
    )
    return status


def _node(
    node_id: str,
    state: str,
    *,
    age_ms: int,
    group_rank: int | None = None,
    rank_first: int | None = None,
) -> pb.NodeStatus:
    return pb.NodeStatus(
        node_id=node_id,
        state=state,
        group_rank=group_rank,
        rank_first=rank_first,
        local_world_size=8,
        address=f"10.0.0.{int(node_id.lstrip('node-')) % 250}",
        state_age_ms=age_ms,
        role="default",
    )
