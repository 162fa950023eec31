"""The tables of the README that are made of bytes and of errors."""

from shared_specs.app.bench.tables import GPU_KIND, GPU_ROWS, TABLES, render

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


def test_time_on_a_gpu_is_the_models_until_a_record_replaces_it():
    model = table("gpu-mlp")
    assert model[0] == "| ms by the model, not measured | A100 | H100 | H200 | B200 |"
    assert [line.split(" | ")[0] for line in model[2:]] == [f"| {name}" for name in GPU_ROWS]
    results = [{"variant": "tiled", "median_seconds": 0.2284}, {"variant": "liger", "left_out": "ImportError"}]
    record = BASE | {"kind": GPU_KIND, "half": "tiled_torch", "results": results}
    assert table("gpu-mlp", record)[:4] == ["| variant | ms |", "| --- | --- |", "| tiled | 228.4 |", ""]


def test_a_number_that_differs_is_noticed():
    results = [{"variant": "tiled", "workload": "w", "worst_weight_error": 0.003, "ratio_to_plain": 0.91}]
    record = BASE | {"kind": "accuracy", "half": "tiled_jax", "results": results}
    written = render("<!-- table: accuracy-jax -->\n<!-- end -->", [record])
    assert render(written, [record]) == written
    tampered = written.replace("0.91", "0.71")
    assert render(tampered, [record]) == written != tampered
