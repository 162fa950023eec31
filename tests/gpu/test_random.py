"""Random streams on CUDA: forks of the device's generator, CUDA graphs, and dropout in recomputation."""

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_cuda():
    if not torch.cuda.is_available():
        pytest.fail("this test needs a GPU that PyTorch sees")
    torch.cuda.manual_seed(5)


def draw():
    return torch.rand(5, device="cuda").tolist()


def numbers(seed: int, times: int = 1):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.rand(5, device="cuda", generator=generator).tolist() for _ in range(times)]


def streams():
    from tiled_torch.parallel import RandomStates

    states = RandomStates()
    states.add("a", 1)
    states.add("b", 2)
    return states


def test_forks_and_states():
    states = streams()
    with states.fork("a"):
        assert draw() == numbers(1)[0]
        with states.fork("b"):
            assert draw() == numbers(2)[0]
    assert draw() == numbers(5)[0]
    taken = states.states()
    for _ in range(2):
        with states.fork("a"):
            assert draw() == numbers(1, 2)[1]
        states.set_states(taken)


def test_a_graph_draws_on_from_its_stream_at_every_replay():
    states = streams()
    graph, out = torch.cuda.CUDAGraph(), torch.empty(5, device="cuda")
    states.register(graph)
    with torch.cuda.graph(graph), states.fork("a"):
        out.copy_(torch.rand(5, device="cuda"))
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(tuple(out.tolist()))
    assert len(set(seen)) == 3
    assert [list(one) for one in seen] == numbers(1, 3)
    assert draw() == numbers(5)[0]
    with states.fork("a"):
        assert draw() == numbers(1, 4)[3]


def test_a_captured_recomputation_is_refused():
    """Before anything of it is captured; the graph is thrown away."""
    from tiled_torch import UnsupportedError, tile
    from tiled_torch.parallel import checkpoint

    x = torch.ones(4, 2, device="cuda", requires_grad=True)
    for call in (lambda: checkpoint(torch.sin, x), lambda: tile(torch.sin, num_shards=2)(x)):
        with pytest.raises(UnsupportedError, match="inside the capture of a CUDA graph"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                call()


def test_recomputation():
    from tiled_torch.parallel import CheckpointWithoutOutput, checkpoint

    states = streams()
    weight = torch.randn(8, 8, device="cuda", requires_grad=True)

    def fn(x):
        with states.fork("a"):
            x = torch.nn.functional.dropout(x, 0.5)
        return torch.nn.functional.dropout(x, 0.5).sin()

    found = []
    taken = states.states()
    for form in ("plain", "checkpoint", "output"):
        states.set_states(taken)
        torch.cuda.manual_seed(5)
        x = torch.ones(4, 8, device="cuda", requires_grad=True)
        call = CheckpointWithoutOutput()
        run = {"plain": lambda fn, x: fn(x), "checkpoint": checkpoint, "output": call.checkpoint}[form]
        h = run(fn, x)
        y = h @ weight
        if form == "output":
            call.discard_output_and_register_recompute(y)
            assert h.untyped_storage().nbytes() == 0
        with states.fork("a"):
            draw()
            found.append(torch.autograd.grad(y.sum(), (x, weight)))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_megatrons_tracker_has_the_numbers_of_its_seeds():
    from tiled_torch.compat.megatron.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    before = torch.get_rng_state()
    model_parallel_cuda_manual_seed(7, tp_rank=3, etp_rank=0, force_reset_rng=True)
    tracker = get_cuda_rng_tracker()
    assert draw() == numbers(7)[0]
    held = tracker.get_states()
    with tracker.fork():
        assert draw() == numbers(7 + 2718 + 3)[0]
        with tracker.fork("data-parallel-rng"), tracker.fork():
            assert draw() == numbers(7 + 2718 + 3, 2)[1]
    tracker.set_states(held)
    with tracker.fork():
        assert draw() == numbers(7 + 2718 + 3)[0]
    assert torch.equal(torch.get_rng_state(), before)
