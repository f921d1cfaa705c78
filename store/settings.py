"""Every setting of every process, in one place that app and learner can both import.

Sources, strongest first: command-line flags, TIDELINE_* environment variables (nested with `__`), tideline.toml,
the defaults of the chosen profile, the defaults below. `tideline config` prints the resolved whole.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A nested group of settings; unknown names are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class EngineSettings(Section):
    """The inference engine that samples: a vLLM API server, or the small transformers engine."""

    kind: Literal["auto", "vllm", "transformers"] = "auto"
    """Which engine to run. `auto` takes vLLM where it is installed and the transformers engine elsewhere."""
    url: str | None = None
    """HTTP address of an engine on another host. Unset: a Unix socket in the data directory."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Number format of the served weights."""
    max_model_len: int = Field(1024, ge=32, le=1_048_576)
    """Longest prompt plus answer, in tokens."""
    max_num_seqs: int = Field(32, ge=1, le=1024)
    """Most requests decoded at once."""
    kv_cache_gib: Positive = 0.5
    """Memory for the KV cache, in GiB. Small on purpose: the learner needs the rest."""
    num_threads: int = Field(0, ge=0, le=1024)
    """CPU threads of the engine; 0 lets it use every core it may run on."""
    prefix_caching: bool = False
    """Reuse the KV cache of equal prompt beginnings. Blocks are salted with the policy version."""
    clear_cache_on_swap: bool = False
    """Recompute running requests under the new weights on a swap, rather than keep their KV cache."""
    startup_timeout_seconds: float = Field(300, gt=0, le=3600)
    """How long the engine may take until it is healthy."""
    extra_args: tuple[str, ...] = ()
    """More arguments for vLLM's API server, word by word."""


class FeedbackSettings(Section):
    """How judgements become rewards."""

    aggregation: Literal["priority", "mean", "weighted_mean"] = "priority"
    """`priority`: human over verifier over reward model, mean within a kind. The others mix all sources."""
    expire_after_seconds: float = Field(7 * 86_400, gt=0)
    """A trajectory nobody judged within this time expires and is never trained."""


class CriticSettings(Section):
    """The value model: the starting policy with frozen attention and embeddings and a scalar head."""

    num_layers: int | None = Field(None, ge=1)
    """Keep only the first layers of the policy; unset keeps all."""
    learning_rate: Positive = 1e-4
    """Adam step size; the paper uses five times the policy's."""
    updates_per_step: int = Field(2, ge=1, le=16)
    """K, critic updates for each policy update."""
    warmup_updates: int = Field(10, ge=0)
    """First updates that train the critic alone; they produce no policy version. A pretrained critic needs none."""
    pretrain_min_trajectories: int = Field(256, ge=0)
    """With this many judged trajectories of the starting policy waiting (20 or more), it is pretrained first; 0: no."""
    pretrain_max_epochs: int = Field(20, ge=1, le=1000)
    """Most passes over them; it stops early once the held-out value loss no longer falls."""
    freeze_attention: bool = True
    """Train everything but attention and token embeddings (SAO.md section 4)."""
    explained_variance_window: int = Field(256, ge=2)
    """Trajectories pooled for the explained variance."""


class PlasticitySettings(Section):
    """What keeps the policy able to change its mind (SAO.md section 6)."""

    kl_coefficient: float = Field(0.05, ge=0)
    """Weight of the exact per-token KL(policy || starting policy) in the loss."""
    return_to_start: bool = True
    """On a detected drop in reward: weights back to the starting policy, fresh optimizer moments."""
    drop_threshold: Fraction = 0.4
    """A batch whose mean reward is below this share of the trailing mean is a detected drop."""
    trailing_batches: int = Field(4, ge=1)
    """Batches in the trailing mean reward."""
    min_trailing_reward: float = Field(0.5, ge=0, le=1)
    """No drop is detected while the trailing mean is below this: a small batch's mean is noisy, and little is lost."""


class AblationSettings(Section):
    """Parts of SAO taken out one at a time, to measure what each does. A server leaves them as they are."""

    trust_region: Literal["double_sided", "unbounded", "none"] = "double_sided"
    """`double_sided` is DIS; `unbounded` keeps every importance ratio; `none` takes every ratio for 1."""
    advantage_level: Literal["token", "turn_last", "turn_mean"] = "token"
    """One advantage per token, or one per turn, from the value at its last token or the mean over its tokens."""
    skip_observations: bool = True
    """Leave observations (tool results, later user turns) out of GAE."""


class LearnerSettings(Section):
    """The SAO loop."""

    algorithm: Literal["sao", "running_mean", "prompt_mean", "grpo", "grpo_dis", "ppo", "vapo", "reinforce"] = "sao"
    """SAO, or a baseline to compare it with. The two GRPOs compare answers to one prompt, which live traffic lacks."""

    enabled: bool = True
    """Start learning at once; when off, trajectories and feedback are stored and wait."""
    seed: int = Field(0, ge=0)
    """Seed of the learner's random numbers."""
    batch_size: int = Field(16, ge=1, le=4096)
    """Judged trajectories in one update."""
    min_batch_size: int = Field(4, ge=1)
    """With at least this many, an update also starts once the oldest has waited `max_wait_seconds`."""
    max_wait_seconds: Positive = 60
    """Longest wait of a judged trajectory before a smaller batch is trained."""
    max_staleness_versions: int = Field(16, ge=0)
    """A trajectory with a token sampled longer ago than this many versions is dropped."""
    min_kept_fraction: Fraction = 0.1
    """A trajectory of which the trust region keeps a smaller share of tokens is dropped."""
    policy_learning_rate: Positive = 2e-5
    """Adam step size of the policy."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm, policy and critic each."""
    eps_low: float = Field(0.3, gt=0, lt=1)
    """Trust region: ratios down to 1 - eps_low are kept."""
    eps_high: Positive = 5.0
    """Trust region: ratios up to 1 + eps_high are kept."""
    gae_alpha: Positive = 1.5
    """lambda of the policy's GAE is 1 - 1 / (gae_alpha * generated tokens)."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount."""
    advantage_scaling: Literal["running_rms", "whiten", "none"] = "running_rms"
    """Divide advantages by a slow running RMS, whiten them per batch, or leave them."""
    advantage_rms_decay: float = Field(0.9, ge=0, lt=1)
    """Decay of the running RMS."""
    advantage_rms_floor: Positive = 0.1
    """Smallest divisor of the running RMS."""
    micro_batch_tokens: int = Field(4096, ge=1)
    """Most padded tokens in one forward pass."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass: less memory, more time."""
    num_threads: int = Field(0, ge=0, le=1024)
    """CPU threads of the learner; 0 takes every core."""
    autocast_bfloat16: bool = True
    """Matrix products in bf16; weights, softmax and losses stay in fp32."""
    lease_seconds: float = Field(120, gt=0)
    """How long claimed trajectories stay claimed without a sign of life."""
    keep_checkpoints: int = Field(3, ge=1)
    """Full training states kept on disk, the newest first."""
    keep_policies: int = Field(3, ge=1)
    """Servable policy directories kept on disk beside the active, its parent and the start."""
    critic: CriticSettings = CriticSettings()
    plasticity: PlasticitySettings = PlasticitySettings()
    ablation: AblationSettings = AblationSettings()

    @model_validator(mode="after")
    def _check_batch_sizes(self) -> LearnerSettings:
        if self.min_batch_size > self.batch_size:
            raise ValueError(f"min_batch_size {self.min_batch_size} is above batch_size {self.batch_size}")
        return self


PROFILES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "engine": {"max_model_len": 1024, "max_num_seqs": 32, "kv_cache_gib": 0.5},
        "learner": {"policy_learning_rate": 8e-5, "critic": {"learning_rate": 4e-4, "num_layers": 8}},
    },
    "micro": {
        "engine": {"max_model_len": 256, "max_num_seqs": 32, "kv_cache_gib": 0.1},
        "learner": {"policy_learning_rate": 1e-3, "critic": {"learning_rate": 5e-3}, "max_wait_seconds": 10},
    },
}
"""Model profiles and the defaults that go with each."""

DEFAULT_PROFILE = "smollm2-135m"


class Settings(BaseSettings):
    """The whole configuration of one Tideline server."""

    model_config = SettingsConfigDict(
        env_prefix="TIDELINE_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        nested_model_default_partial_update=True,
    )

    profile: Literal["smollm2-135m", "micro"] = "smollm2-135m"
    """Model and matching defaults: `smollm2-135m` (real, from an installed package) or `micro` (built locally)."""
    model: str | None = None
    """A model directory or hub id to start from instead of the profile's own model."""
    host: str = "127.0.0.1"
    """Address the HTTP service binds to."""
    port: int = Field(8000, ge=0, le=65535)
    """Port the HTTP service binds to."""
    data_dir: Path = Path("data")
    """Where models, policies, checkpoints, the socket and the SQLite database live."""
    database_url: str | None = None
    """SQLAlchemy URL. Unset: SQLite in the data directory. PostgreSQL: postgresql://user@host/name."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""
    engine: EngineSettings = EngineSettings()
    feedback: FeedbackSettings = FeedbackSettings()
    learner: LearnerSettings = LearnerSettings()

    @property
    def resolved_database_url(self) -> str:
        """The database URL, with the SQLite default filled in."""
        return self.database_url or f"sqlite:///{self.data_dir.resolve() / 'tideline.db'}"

    @property
    def engine_socket(self) -> Path:
        """Unix socket of the local engine, mode 0600."""
        return self.data_dir.resolve() / "engine.sock"

    @property
    def policies_dir(self) -> Path:
        """One directory per policy version, v000000 and up."""
        return self.data_dir.resolve() / "policies"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        toml = TomlConfigSettingsSource(settings_cls, Path(os.environ.get("TIDELINE_CONFIG", "tideline.toml")))
        named = [source().get("profile") for source in (init_settings, env_settings, toml)]
        profile = next((name for name in named if name), DEFAULT_PROFILE)
        defaults = InitSettingsSource(settings_cls, init_kwargs=PROFILES.get(profile, {}))
        return init_settings, env_settings, toml, defaults


def policy_directory_name(version: int) -> str:
    """Name of the directory that holds policy `version`: v000042."""
    return f"v{version:06d}"
