"""The symmetric-memory path of the inference layers against the plain collectives, on several GPUs of one host.

`torchrun` is not needed: one process a GPU is spawned here. With one GPU, or none with multicast, the path must be refused.
"""

import os
import socket
from typing import Any

import pytest

from shared_specs.tolerances import limit

pytestmark = pytest.mark.gpu


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def on_rank(rank: int, world: int, port: int, results: Any) -> None:
    import torch
    import torch.distributed as dist

    from tests.layers.ranks_torch_inference import problem
    from tests.loss.ranks_torch_loss import distance
    from tiled_torch import parallel

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device)
    a = {name: one.to(device) for name, one in problem(world, torch.bfloat16).items()}
    given = (a["x"].chunk(world, -1)[rank], a["weight"].chunk(world, 1)[rank], a["residual"].chunk(world)[rank])
    chosen, reason = parallel.inference_path(device)
    answer: dict[str, Any] = {"path": chosen, "reason": reason, "errors": []}
    with torch.no_grad():
        if chosen == "symmetric_memory":
            for _ in range(3):  # the buffers are used again
                plain, fused = (
                    parallel.row_parallel_linear_residual_norm(*given, a["next_norm_weight"], a["bias"], path=path)
                    for path in ("collectives", "symmetric_memory")
                )
                answer["errors"] += [distance(b.double(), c.double()) for b, c in zip(fused, plain, strict=True)]
        else:
            try:
                parallel.row_parallel_linear_residual_norm(*given, a["next_norm_weight"], path="symmetric_memory")
                answer["refused"] = "accepted"
            except NotImplementedError as error:
                answer["refused"] = str(error)
    results[rank] = answer
    dist.destroy_process_group()


def test_both_paths_give_the_same_result() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.fail("this test needs a GPU that PyTorch sees")
    world = min(torch.cuda.device_count(), 8)
    with torch.multiprocessing.get_context("spawn").Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(on_rank, (world, free_port(), results), nprocs=world)
        answers = [results[rank] for rank in range(world)]
    for answer in answers:
        if answer["path"] == "collectives":
            assert answer["reason"] in answer["refused"]
        else:
            assert max(answer["errors"]) <= limit(0.0, "bfloat16") + limit(2.0**-9, "bfloat16")
