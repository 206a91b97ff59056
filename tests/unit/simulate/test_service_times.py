"""Times of workers beside the table that they come from."""

import csv
import gzip
from importlib.resources import files

import pytest

from headrace.errors import InvalidRequest
from headrace.simulate.service_times import MACHINES, service_times

HOST_S = {"prefill": 5e-3, "decode": 1.5e-3}
TABLE = files("headrace.simulate").joinpath("data", "costmodel_llama31_hopper.csv.gz")


@pytest.mark.parametrize("name", MACHINES)
def test_measured_points_are_met(name):
    machine, times = service_times(name)
    met = 0
    for row in csv.DictReader(gzip.decompress(TABLE.read_bytes()).decode().splitlines()):
        if (row["system"], row["model"], int(row["tp"])) != (machine.system, machine.model, machine.gpus):
            continue
        batch, context = int(row["batch"]), int(row["context_per_seq"])
        found_s = (
            times.prefill_s(int(row["new_tokens_per_seq"]), 0)
            if row["phase"] == "prefill"
            else times.decode_s(batch, batch * context)
        )
        assert found_s == pytest.approx(float(row["kernel_ms"]) / 1e3 + HOST_S[row["phase"]]), row
        met += 1
    assert met > 50


def test_coefficients_are_those_of_the_literature_on_these_tables():
    """Llama 70B on eight H200, by another fit of the same points: 6.25 ms, 0.03595 ms a token, 5.98e-7."""
    cost = service_times("70b-8xh200")[1].prefill
    assert cost.base_s == pytest.approx(6.25e-3, rel=0.15)
    assert cost.token_s == pytest.approx(0.03595e-3, rel=0.03)
    assert cost.attention_s == pytest.approx(5.98e-10, rel=0.15)


@pytest.mark.parametrize("name", MACHINES)
def test_more_work_takes_longer(name):
    _, times = service_times(name)
    lengths = [1, 100, 700, 3_000, 10_000, 30_000, 126_000]
    prefill = [times.prefill_s(n, 0) for n in lengths]
    assert prefill == sorted(prefill)
    assert times.prefill_s(1_000, 50_000) > times.prefill_s(1_000, 0)
    for batch in (1, 3, 50, 200, 400):
        assert times.decode_s(batch, batch * 60_000) > times.decode_s(batch, batch * 1_000)


def test_an_unknown_machine_is_refused_by_name():
    with pytest.raises(InvalidRequest, match="machine: 'tpu' is not allowed; known machines: 8b-1xh100"):
        service_times("tpu")
