"""Counters as Prometheus reads them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from heedful.serve.metrics import Metrics


def values(metrics: Metrics) -> dict[str, float]:
    """Each sample by its name and labels."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_what_a_worker_tells_is_what_prometheus_reads():
    metrics = Metrics()
    tiny = metrics.model("tiny")
    tiny.loaded(1000, 5000, 64)
    tiny.step(running=2, waiting=3, rows=5, prompt_tokens=40, generated_tokens=2, preempted=1)
    tiny.step(running=1, waiting=0, generated_tokens=1)
    tiny.first_token(0.02)
    tiny.next_token(0.002)
    tiny.cancelled()
    tiny.cache(64, 1024)
    found = values(metrics)
    assert found["heedful_prompt_tokens_total{model=tiny}"] == 40
    assert found["heedful_generated_tokens_total{model=tiny}"] == 3
    assert found["heedful_running_requests{model=tiny}"] == 1
    assert found["heedful_waiting_requests{model=tiny}"] == 0
    assert found["heedful_cancelled_requests_total{model=tiny}"] == 1
    assert found["heedful_preempted_requests_total{model=tiny}"] == 1
    assert found["heedful_max_rows{model=tiny}"] == 64
    assert found["heedful_time_to_first_token_seconds_count{model=tiny}"] == 1
    assert found["heedful_time_per_token_seconds_sum{model=tiny}"] == 0.002
    assert found["heedful_cache_used_tokens{model=tiny}"] == 64
    assert found["heedful_cache_size_tokens{model=tiny}"] == 1024
    assert found["heedful_model_memory_bytes{model=tiny}"] == 1000
    assert found["heedful_cache_memory_bytes{model=tiny}"] == 5000
    tiny.unloaded()
    assert values(metrics)["heedful_model_loaded{model=tiny}"] == 0


def test_applications_do_not_share_their_counts():
    one, other = Metrics(), Metrics()
    one.request_finished("/health", 200, 0.001)
    assert values(one)["heedful_requests_total{path=/health,status=200}"] == 1
    assert not any(name.startswith("heedful_requests_total") for name in values(other))
