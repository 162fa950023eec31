"""The tables of the README that are made of bytes and of errors."""

from shared_specs.app.bench.gpu_tables import EXPECTED, KERNELS, MEASURED
from shared_specs.app.bench.tables import TABLES, render
from shared_specs.app.bench.workloads import MODEL_WORKLOADS

HARDWARE = {"cpu": "c", "cores": 1, "memory_bytes": 2**30}
BASE = {"date": "2026-01-01T00:00:00Z", "hardware": HARDWARE, "versions": {"python": "3.11"}}


def table(name, *records):
    return TABLES[name](list(records)).splitlines()


def test_bytes():
    results = [
        {"variant": "plain", "workload": "w", "peak_bytes": 96 * 2**20},
        {"variant": "tiled", "workload": "w", "peak_bytes": 19 * 2**20, "predicted_bytes": 20 * 2**20},
        {"variant": "products-18", "workload": "w"},
        {"variant": "plain", "workload": "v", "peak_bytes": 2**19},
    ]
    record = BASE | {"kind": "mlp", "half": "tiled_torch", "results": results}
    lines = table("mlp-bytes-torch", record)
    assert lines[:4] == [
        "| peak MiB (predicted) | w | v |",
        "| --- | --- | --- |",
        "| plain | 96.0 | 0.5 |",
        "| tiled | 19.0 (20.0) |  |",
    ]
    assert lines[4:] == ["", "2026-01-01, c, 1 cores, 1 GiB; python 3.11."]
    assert table("mlp-bytes-jax", record) == ["No record yet."]


def test_bytes_of_compiled_programs():
    results = [{"variant": "tiled", "workload": "w", "temp_bytes": 2**20, "predicted_bytes": 2**21}]
    record = BASE | {"kind": "mlp", "half": "tiled_jax", "results": results}
    lines = table("mlp-bytes-jax", record)
    assert (lines[0], lines[2]) == ("| peak MiB (at most) | w |", "| tiled | 1.0 (2.0) |")
    older = record | {"results": [{"variant": "tiled", "workload": "w", "temp_bytes": 2**20}]}
    assert table("mlp-bytes-jax", older) == ["No record yet."]


def test_a_table_for_each_set_of_versions_of_jax():
    def record(version, ratio):
        results = [{"variant": "tiled", "workload": "w", "ratio_to_plain": ratio}]
        return BASE | {"kind": "mlp", "half": "tiled_jax", "versions": {"jax": version}, "results": results}

    records = [record("0.10.2", 1.01), record("0.11.2", 1.02), record("0.10.2", 1.03)]
    assert table("mlp-jax", *records)[2] == "| tiled | 1.03 |"
    assert table("mlp-jax-new", *records)[2] == "| tiled | 1.02 |"
    assert table("mlp-jax-new", records[0]) == ["No record yet."]


def test_simulations():
    """The newest of each; longer contexts behind shorter ones, with what the formulas say today."""
    sizes = {"model": "qwen3-8b", "gpus": 8, "set": {"gpus": 8, "context": 8, "offload": True}}
    results = [
        sizes | {"tokens": tokens, "simulated_bytes": gib * 2**30, "simulated_host_bytes": 2**30}
        | {"set": sizes["set"] | {"tokens": tokens}}
        for tokens, gib in ((2**20, 32), (2**17, 20))
    ]  # fmt: skip
    older = BASE | {"kind": "plan", "half": "tiled_torch", "results": [results[0] | {"simulated_bytes": 2**30}]}
    lines = table("plan", older, BASE | {"kind": "plan", "half": "tiled_torch", "results": results})
    assert [line.split("|")[3].strip() for line in lines[2:4]] == ["131072", "1048576"]
    assert lines[3] == "| tiled_torch | qwen3-8b | 1048576 | 8 | 28.2 | 32.0 | 1.0 | 0.882 |"
    assert table("plan") == ["No record yet."]


def test_published():
    lines = table("published")
    assert lines[3].startswith(
        "| TRL, Training beyond 1M tokens, 2026-09 | the same, inputs on the host, loss in chunks | 56.2 GB |"
    )
    assert lines[-1].endswith("| not comparable |  | no figure is given |")


def test_a_mesh():
    result = {"variant": "tiled", "workload": "w", "ratio_to_plain": 0.784, "temp_bytes": 3 * 2**19}
    results = [result | {"collectives": {"all-gather": 3, "all-reduce": 1}}]
    lines = table("mesh-jax", BASE | {"kind": "mesh", "half": "tiled_jax", "results": results})
    assert lines[2] == "| tiled, w | 0.78 | 1.5 | 3 all-gather, 1 all-reduce |"
    assert table("mesh-jax") == ["No record yet."]


def test_accuracy():
    results = [
        {"variant": "plain", "workload": "w", "worst_weight_error": 0.00327, "ratio_to_plain": 1.0},
        {"variant": "liger", "workload": "w", "worst_weight_error": 0.01807, "ratio_to_plain": 5.694},
        {"variant": "deepspeed", "workload": "w", "left_out": "ImportError: none"},
    ]
    record = BASE | {"kind": "accuracy", "half": "tiled_torch", "results": results}
    assert table("accuracy-torch", record)[:5] == [
        "| variant | worst weight-gradient error | error / plain, worst weight |",
        "| --- | --- | --- |",
        "| plain | 0.33% | 1.00 |",
        "| liger | 1.81% | 5.69 |",
        "| deepspeed | left out |  |",
    ]
    assert table("accuracy-jax", record) == ["No record yet."]
    several = record | {"half": "tiled_jax", "results": [results[0], results[1] | {"workload": "v"}]}
    assert table("accuracy-jax", several)[2:4] == ["| plain, w | 0.33% | 1.00 |", "| liger, v | 1.81% | 5.69 |"]


def test_what_a_gpu_measured():
    """Of a variant in two records the first one's row; what was wrong or not there says so."""
    timed = {"median_seconds": 0.2284, "ratio_to_plain": 1.214, "tflops": 651.2, "peak_bytes": 2**30}
    results = [{"variant": "tiled", **timed, "predicted_bytes": 2**29}, {"variant": "liger", "left_out": "ImportError"}]
    half, kinds = MEASURED["mlp"]
    first = BASE | {"kind": kinds[0], "half": half, "results": results, "gpu": {"name": "NVIDIA H200"}}
    again = first | {
        "kind": kinds[1],
        "results": [{"variant": "tiled", "left_out": "wrong: y"}, {"variant": "a", **timed}],
    }
    found = table("gpu-mlp", first, again)
    assert found[0] == "|  | ms | time / tiled | TFLOP/s | peak GiB | predicted GiB |"
    assert found[2:5] == [
        "| tiled | 228.4 | 1.21 | 651 | 1.00 | 0.50 |",
        "| liger | not measured |  |  |  |  |",
        "| a | 228.4 | 1.21 | 651 | 1.00 |  |",
    ]
    assert found[6].startswith("NVIDIA H200; ")
    assert table("gpu-mlp-short", first, again)[2:4] == ["| liger | not measured |  |  |  |  |", found[2]]
    assert table("gpu-mlp-jax", first) == ["No record yet."]
    wrong = [{"variant": "keep", "left_out": "wrong: dx"}]
    jax = table("gpu-mlp-jax", first | {"half": "tiled_jax", "results": wrong})
    assert jax[0].endswith("| temporary GiB | at most GiB |")
    assert jax[2] == "| keep | wrong |  |  |  |  |"


def test_kernels_beside_the_library():
    rows = [
        {"group": "up", "variant": "vendor", "median_seconds": 0.00253, "tflops": 760.0},
        {"group": "glu", "variant": "kernel", "median_seconds": 0.000163, "tflops": None, "gbytes_per_second": 4314.0},
        {"group": "glu", "variant": "other", "left_out": "it hung"},
    ]
    record = BASE | {"kind": KERNELS, "half": "tiled_torch", "results": rows, "gpu": {"name": "NVIDIA H200"}}
    assert table("gpu-kernels", record)[2:5] == [
        "| PyTorch, up | vendor | 2.530 | 760 TFLOP/s |",
        "| PyTorch, glu | kernel | 0.163 | 4314 GB/s |",
        "",
    ]


def test_what_the_model_of_the_time_expects():
    model = table("gpu-model")
    assert model[0] == "| ms by the model | A100 | H100 | H200 | B200 |"
    assert [line.split(" | ")[0] for line in model[2:]] == [f"| {name}" for name in EXPECTED]


def test_a_number_that_differs_is_noticed():
    results = [{"variant": "tiled", "workload": "w", "worst_weight_error": 0.003, "ratio_to_plain": 0.91}]
    record = BASE | {"kind": "accuracy", "half": "tiled_jax", "results": results}
    written = render("<!-- table: accuracy-jax -->\n<!-- end -->", [record])
    assert render(written, [record]) == written
    tampered = written.replace("0.91", "0.71")
    assert render(tampered, [record]) == written != tampered


def test_a_whole_model():
    """Each dtype has a table of its own."""
    errors = {
        "loss_error": 4.6e-7,
        "gradients_error": 1.2e-5,
        "worst_gradient_error": 3.14e-5,
        "worst_gradient": "norm",
    }
    wide, narrow = MODEL_WORKLOADS
    assert (wide.dtype, narrow.dtype) == ("float32", "bfloat16")
    results = [{"variant": "tiled", "workload": wide.name, **errors}]
    results.append(results[0] | {"workload": narrow.name, "loss_error": 5e-4})
    torch, jax = (BASE | {"kind": "model", "half": half, "results": results} for half in ("tiled_torch", "tiled_jax"))
    of_torch, of_jax = (f"| {name}, tiled | 4.6e-07 | 1.2e-05 | 3.1e-05 |" for name in ("PyTorch", "JAX"))
    assert table("model", torch)[2:4] == [of_torch, ""]
    both = table("model", torch, jax)
    assert both[2:5] == [of_torch, of_jax, ""]
    assert len(both) == 7, "a line of versions for each record"
    assert table("model") == ["No record yet."]
    assert table("model-bfloat16", torch)[2] == "| PyTorch, tiled | 5.0e-04 | 1.2e-05 | 3.1e-05 |"


def test_alternatives():
    """Measured at the first workload; an error that nobody measured is an empty cell, and so is a peer that did not run."""
    shared = {"workload": "w", "peak_bytes": 2**21, "ratio_to_plain": 1.0}
    mlp = [
        {"variant": "plain", **shared},
        {"variant": "tiled", **shared, "ratio_to_plain": 0.994},
        {"variant": "tiled", **shared, "workload": "v", "peak_bytes": 2**30},
        {"variant": "liger", **shared, "peak_bytes": 2**20, "ratio_to_plain": 1.26},
    ]
    accuracy = [
        {"variant": "plain", "shards": 8, "worst_weight_error": 0.0033},
        {"variant": "tiled", "shards": 8, "worst_weight_error": 0.003},
        {"variant": "liger", "shards": 8, "left_out": "no such device"},
    ]
    records = [
        BASE | {"kind": kind, "half": "tiled_torch", "results": results}
        for kind, results in (("mlp", mlp), ("accuracy", accuracy))
    ]
    lines = table("alternatives", *records)
    assert lines[0] == "|  | plain | checkpoint | Liger | DeepSpeed | **this** |"
    assert lines[2:5] == [
        "| peak MiB (a) | 2 |  | 1 |  | 2 |",
        "| time / plain (a) | 1.00 |  | 1.26 |  | 0.99 |",
        "| worst weight-gradient error, bfloat16 (b) | 0.33% |  |  |  | 0.30% |",
    ]
    assert lines[-2] == "(a) w, float32, on a CPU, `keep=0`. (b) 8 shards, against float64."
    assert table("alternatives", records[0]) == ["No record yet."]


def test_simulations_of_both_halves_have_a_line_of_versions_each():
    """That of the newest record of a half, whichever half is newer."""
    setting = {"tokens": 4096, "gpus": 8, "context": 8}
    result = {"model": "llama-3-8b", "tokens": 4096, "gpus": 8, "simulated_bytes": 2**34, "simulated_host_bytes": 0}
    of = {"kind": "plan", "hardware": HARDWARE}
    records = [
        of | {"half": half, "date": date, "versions": {name: "1"}, "results": [result | {"set": setting | {"half": half[6:]}}]}
        for half, name, date in (
            ("tiled_torch", "old", "2026-01-01"), ("tiled_torch", "torch", "2026-01-02"), ("tiled_jax", "jax", "2026-01-03"),
        )
    ]  # fmt: skip
    lines = table("plan", *records)
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| tiled_jax", "| tiled_torch"]
    assert [line.split("; ")[1] for line in lines[5:]] == ["jax 1.", "torch 1."]
