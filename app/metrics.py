"""Prometheus metrics of one app, in a registry of its own so that two apps in a process do not share numbers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """The app's counters and gauges. Gauges of the store are set when they are asked for."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "tideline_http_requests_total",
            "HTTP requests answered.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "tideline_http_request_seconds",
            "Time from a request's arrival to the last byte of its answer.",
            ("route",),
            buckets=(0.005, 0.02, 0.1, 0.5, 1, 2, 5, 15, 60, 300),
            registry=self.registry,
        )
        self.generated_tokens = Counter(
            "tideline_generated_tokens_total", "Tokens sampled for clients.", registry=self.registry
        )
        self.trajectories = Counter(
            "tideline_trajectories_total", "Trajectories stored.", ("trainable",), registry=self.registry
        )
        self.feedback = Counter(
            "tideline_feedback_total",
            "Feedback stored, by its first status.",
            ("kind", "status"),
            registry=self.registry,
        )
        self.num_ready = Gauge(
            "tideline_queue_ready", "Judged trajectories that wait for the learner.", registry=self.registry
        )
        self.num_leased = Gauge(
            "tideline_queue_leased", "Judged trajectories that the learner is training.", registry=self.registry
        )
        self.oldest_ready_seconds = Gauge(
            "tideline_queue_oldest_age_seconds", "Age of the oldest waiting trajectory.", registry=self.registry
        )
        self.policy_version = Gauge("tideline_policy_version", "The active policy version.", registry=self.registry)
