"""What the server counts, for Prometheus, by names close to vLLM's. Knows no model."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The counters of one server. Gauges are set when they are read."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.model = Info("model", "What runs the model.", namespace="llama_kv", registry=self.registry)
        counter = partial(Counter, namespace="llama_kv", registry=self.registry)
        self.fed = counter("tokens_fed", "Tokens that the model was fed.")
        self.prompts = counter("prompt_tokens", "Tokens of prompts.")
        self.reused = counter("prefix_cache_hits", "Tokens of prompts that were not fed: a text before begins alike.")
        self.made = counter("generation_tokens", "Tokens that were generated.")
        self.proposed = counter("spec_decode_num_draft_tokens", "Guessed tokens that were fed.")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Guessed tokens that were right.")
        self.ended = counter("request_success", "Texts that have ended.", ["finished_reason"])
        about = "Texts without an end: refused, failed, or cancelled, also by a client that has left or a time limit."
        self.failed = counter("request_failure", about, ["reason"])
        self.checked = counter("texts_checked", "Ended texts that were generated again, alone.")
        self.differed = counter("texts_differed", "Checked texts whose ids or log-probabilities differed.")
        gauge = partial(Gauge, namespace="llama_kv", registry=self.registry)
        self.running = gauge("num_requests_running", "Texts that generate, or whose prompt is being fed.")
        self.waiting = gauge("num_requests_waiting", "Texts of which nothing was fed yet.")
        self.cache = gauge("cache_bytes", "Bytes of all caches, also of ended texts that are kept.")
        self.predicted = gauge("predicted_cache_bytes", "Bytes of cache of the running texts at their ends.")
        times = partial(Histogram, namespace="llama_kv", registry=self.registry)
        about = "Seconds from a text's arrival to its first token."
        self.first = times("time_to_first_token_seconds", about, buckets=SECONDS)
        about = "Seconds from a token of a text to its next one; of several at a time, their share."
        self.between = times("inter_token_latency_seconds", about, buckets=(0.001, 0.0025, 0.005, *SECONDS[:10]))
        about = "Seconds from a request's head to the end of its answer; its count is that of requests."
        self.requests = times("http_request_duration_seconds", about, ["path", "status"], buckets=SECONDS)
