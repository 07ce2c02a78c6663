"""How each kind of fault is brought about, and how it is known that it happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from tests.chaos.deployment import PARTITIONS, Deployment, Unexpected, wait_until
from tests.chaos.schedule import Fault, Kind
from tests.servers.kafka import KafkaCluster

READY_S = 60.0
"""How long a worker may take from its start to its partitions, on a loaded machine in the middle of other faults."""

MET = 3
"""So many requests must have met a fault of the engine before it ends."""

MEET_S = 20.0

STORM = 2
"""So many workers join and leave in a storm."""

Injection = Iterator[None]
"""Makes ready, yields, strikes, ends with everything as it was. Raises Unexpected where something did not happen."""


def inject(deployment: Deployment, fault: Fault) -> Injection:
    return _INJECTIONS[fault.kind](deployment, fault)


def _worker_kill(deployment: Deployment, fault: Fault) -> Injection:
    worker = deployment.workers[fault.target]
    wait_until(lambda: worker.assigned() > 0, f"{worker.name} has partitions", READY_S)
    yield
    worker.kill()
    time.sleep(fault.hold_s)
    worker.start()


def _worker_term(deployment: Deployment, fault: Fault) -> Injection:
    worker = deployment.workers[fault.target]
    wait_until(lambda: worker.assigned() > 0, f"{worker.name} has partitions", READY_S)
    yield
    try:
        worker.terminate()
    finally:
        time.sleep(fault.hold_s)
        worker.start()


def _worker_sleep(deployment: Deployment, fault: Fault) -> Injection:
    worker = deployment.workers[fault.target]
    others = [each for each in deployment.workers if each is not worker]
    wait_until(lambda: worker.assigned() > 0, f"{worker.name} has partitions", READY_S)
    yield
    worker.freeze()
    try:
        time.sleep(fault.hold_s)
        wait_until(
            lambda: sum(other.assigned() for other in others) == PARTITIONS,
            f"the others have the partitions of {worker.name}",
            READY_S,
        )
    finally:
        worker.thaw()
    wait_until(lambda: worker.ended is not None or worker.assigned() > 0, f"{worker.name} is back", READY_S)


def _worker_storm(deployment: Deployment, fault: Fault) -> Injection:
    yield
    for number in range(STORM):
        extra = deployment.worker()
        extra.start()
        try:
            wait_until(lambda e=extra: e.assigned() > 0, f"{extra.name} has partitions", READY_S)  # type: ignore[misc]
            time.sleep(fault.hold_s)
            if number % 2 == 0:
                extra.terminate()
        except Unexpected as problem:
            raise Unexpected(f"{problem}\n{extra.tail()}") from None
        finally:
            extra.kill()


def _engine_fault(**behaviour: object) -> Callable[[Deployment, Fault], Injection]:
    def injection(deployment: Deployment, fault: Fault) -> Injection:
        engine = deployment.engine
        before = engine.tell()["faults"]
        yield
        engine.tell(share=0.3, **behaviour)
        try:
            time.sleep(fault.hold_s)
            wait_until(lambda: engine.tell()["faults"] >= before + MET, "requests met the engine's fault", MEET_S)
        finally:
            engine.tell(fault="none")

    return injection


def _engine_kill(deployment: Deployment, fault: Fault) -> Injection:
    yield
    deployment.engine.kill()
    time.sleep(fault.hold_s)
    deployment.engine.start()


def _redis_kill(deployment: Deployment, fault: Fault) -> Injection:
    yield
    deployment.redis.kill()
    time.sleep(fault.hold_s)
    deployment.redis.start()


def _redis_freeze(deployment: Deployment, fault: Fault) -> Injection:
    yield
    deployment.redis.freeze()
    time.sleep(fault.hold_s)
    deployment.redis.thaw()


def _broker_freeze(deployment: Deployment, fault: Fault) -> Injection:
    yield
    node = deployment.node(fault.target)
    node.freeze()
    time.sleep(fault.hold_s)
    node.thaw()
    if isinstance(deployment.kafka, KafkaCluster):
        deployment.kafka.wait_in_sync()


def _broker_kill(deployment: Deployment, fault: Fault) -> Injection:
    """With the copies in step again when it ends: two nodes away would only stop the writes."""
    cluster = deployment.kafka
    if not isinstance(cluster, KafkaCluster):
        raise Unexpected("the only broker must not be killed")
    yield
    node = cluster.nodes[fault.target]
    node.kill()
    time.sleep(fault.hold_s)
    node.start()
    cluster.wait_in_sync()


def _all_cut(deployment: Deployment, fault: Fault) -> Injection:
    for worker in deployment.workers:
        wait_until(lambda w=worker: w.assigned() > 0, f"{worker.name} has partitions", READY_S)  # type: ignore[misc]
    yield
    for node in deployment.all_nodes:
        node.freeze()
    try:
        time.sleep(fault.hold_s)
        for worker in deployment.workers:
            worker.kill()
    finally:
        for node in deployment.all_nodes:
            node.thaw()
    for worker in deployment.workers:
        worker.start()


_INJECTIONS: Mapping[Kind, Callable[[Deployment, Fault], Injection]] = {
    Kind.WORKER_KILL: _worker_kill,
    Kind.WORKER_TERM: _worker_term,
    Kind.WORKER_SLEEP: _worker_sleep,
    Kind.WORKER_STORM: _worker_storm,
    Kind.ENGINE_500: _engine_fault(fault="status", status=500),
    Kind.ENGINE_503: _engine_fault(fault="status", status=503),
    Kind.ENGINE_DROP: _engine_fault(fault="close"),
    Kind.ENGINE_KILL: _engine_kill,
    Kind.REDIS_KILL: _redis_kill,
    Kind.REDIS_FREEZE: _redis_freeze,
    Kind.BROKER_FREEZE: _broker_freeze,
    Kind.BROKER_KILL: _broker_kill,
    Kind.ALL_CUT: _all_cut,
}
