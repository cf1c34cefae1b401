"""What a decoder is: read from a checkpoint's config.json, checked once, never changed after."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_ROPE_FIELDS = {
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    },
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}
_ROPE_OPTIONAL = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message is one line naming the path and what is allowed."""


def one_line(error: BaseException) -> str:
    """A library's message, folded onto one line."""
    return " ".join(str(error).split()) or type(error).__name__


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding, its parameters under transformers' names; None: not used by the type."""

    theta: float = 10_000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.rope_type == "default":
            return
        allowed = _ROPE_FIELDS.get(self.rope_type)
        if allowed is None:
            raise ValueError(_rope_type_error(self.rope_type))
        for name in sorted(allowed - _ROPE_OPTIONAL - {"truncate"}):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or value <= 0:
                raise ValueError(f"rope {self.rope_type}: {name} is {value!r}; must be above 0")
        if self.factor < 1:
            raise ValueError(f"rope {self.rope_type}: factor is {self.factor}; must be at least 1")
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            raise ValueError("rope llama3: low_freq_factor must be below high_freq_factor")

    def as_transformers(self) -> dict[str, Any]:
        """The scaling's parameters as the dict that transformers reads."""
        used = _ROPE_FIELDS[self.rope_type]
        values = {k: v for k, v in asdict(self).items() if k in used and v is not None}
        return {"rope_type": self.rope_type, **values}


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape and arithmetic of a Llama, Qwen2 or Qwen3 decoder.

    head_dim:       even; need not be hidden_size / num_heads
    max_position_embeddings: positions the model can tell apart, in tokens
    bias:           which of attention's projections have one
    qk_norm:        an RMSNorm over head_dim on every query and key head, before the rotation
    eos_token_ids:  every id that ends a text (config.json, then generation_config.json)
    dtype:          the checkpoint's own
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope: Rope = Rope()
    bias: Literal["none", "qkv", "qkvo"] = "none"
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        sizes = {f.name: getattr(self, f.name) for f in fields(self)[:9]}
        for name, value in {**sizes, "rope_theta": self.rope.theta}.items():
            if not value > 0:
                raise ValueError(f"{name} is {value}; must be above 0")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; must be even")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype}; allowed: {', '.join(map(str, DTYPES))}")

    @property
    def qkv_bias(self) -> bool:
        return self.bias != "none"

    @property
    def o_bias(self) -> bool:
        return self.bias == "qkvo"

    @property
    def q_size(self) -> int:
        """Rows of the query projection: num_heads * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection: num_kv_heads * head_dim."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_pretrained(cls, path: Path) -> DecoderConfig:
        """Read a checkpoint folder in Hugging Face layout.

        Raises CheckpointError where the folder, config.json or what it asks for cannot be used.
        """
        file = path / "config.json"
        architecture = _architecture(file, _read_json(file))
        generation_eos = _generation_eos(path / "generation_config.json")
        try:
            hf_config = AutoConfig.from_pretrained(path, local_files_only=True)
            return _from_transformers(architecture, hf_config, generation_eos)
        except Exception as error:
            raise CheckpointError(f"{file}: {one_line(error)}") from error


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotary tables as transformers computes them, attention scaling included.

    cos, sin: [max_positions, head_dim] float32; both halves of the last axis are equal, for the
    rotation x * cos + concat(-x[d/2:], x[:d/2]) * sin.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def build(cls, config: DecoderConfig, max_positions: int) -> RopeTable:
        """Tables for positions 0..max_positions - 1; at most config.max_position_embeddings.

        Dynamic scaling changes nothing up to there, and beyond it would turn keys that are already
        cached: that is why the table ends there. Raises ValueError beyond it.
        """
        if not 0 < max_positions <= config.max_position_embeddings:
            raise ValueError(
                f"max_positions is {max_positions}; "
                f"allowed: 1..{config.max_position_embeddings} (max_position_embeddings)"
            )
        inverse_frequencies, attention_scaling = _inverse_frequencies(config)
        angles = torch.arange(max_positions).float()[:, None] * inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return cls(cos=angles.cos() * attention_scaling, sin=angles.sin() * attention_scaling)


def _inverse_frequencies(config: DecoderConfig) -> tuple[torch.Tensor, float]:
    """[head_dim / 2] float32, and the factor on cos and sin."""
    if config.rope.rope_type == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float) / config.head_dim
        return 1.0 / (config.rope.theta**exponents), 1.0
    # The older spelling, which every transformers from 4 on still reads.
    parameters: dict[str, Any] = {
        "hidden_size": config.num_heads * config.head_dim,
        "num_attention_heads": config.num_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope.theta,
        "rope_scaling": config.rope.as_transformers(),
    }
    rope_init = ROPE_INIT_FUNCTIONS[config.rope.rope_type]
    frequencies, factor = rope_init(LlamaConfig(**parameters), "cpu")
    return frequencies.float(), float(factor)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.parent.is_dir():
        raise CheckpointError(f"{file.parent}: no such folder; a checkpoint folder is expected")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: not valid JSON ({one_line(error)})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: must hold a JSON object")
    return content


def _architecture(file: Path, raw: dict[str, Any]) -> str:
    """The one architecture that is named, once nothing else is asked for that is not done here."""
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise CheckpointError(
            f"{file}: architectures is {names!r}; allowed: one of {', '.join(ARCHITECTURES)}"
        )
    model_type = names[0].removesuffix("ForCausalLM").lower()
    if raw.get("model_type") != model_type:
        raise CheckpointError(
            f"{file}: model_type is {raw.get('model_type')!r}; {names[0]} needs {model_type!r}"
        )
    if raw.get("quantization_config"):
        raise CheckpointError(
            f"{file}: quantized weights are not read; allowed: float32, bfloat16 or float16"
        )
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type != "default" and rope_type not in _ROPE_FIELDS:
        raise CheckpointError(f"{file}: {_rope_type_error(rope_type)}")
    return str(names[0])


def _rope_type_error(rope_type: str) -> str:
    return f"rope_type is {rope_type!r}; allowed: {', '.join(['default', *_ROPE_FIELDS])}"


def _from_transformers(
    architecture: str, hf_config: Any, generation_eos: tuple[int, ...]
) -> DecoderConfig:
    # The others take no notice of these keys, whatever config.json says.
    if architecture == "LlamaForCausalLM" and getattr(hf_config, "mlp_bias", False):
        raise ValueError("mlp_bias is true; allowed: false")
    if not getattr(hf_config, "is_causal", True):
        raise ValueError("is_causal is false; allowed: true")
    _refuse_sliding_window(hf_config)
    has_bias_key = architecture != "Qwen2ForCausalLM"
    attention_bias = has_bias_key and bool(getattr(hf_config, "attention_bias", False))
    if hf_config.hidden_act != "silu":
        raise ValueError(f"hidden_act is {hf_config.hidden_act!r}; allowed: silu")
    eos_token_ids = _token_ids(hf_config.eos_token_id) + generation_eos
    head_dim = getattr(hf_config, "head_dim", None)
    return DecoderConfig(
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.intermediate_size,
        num_layers=hf_config.num_hidden_layers,
        num_heads=hf_config.num_attention_heads,
        num_kv_heads=hf_config.num_key_value_heads,
        head_dim=head_dim or hf_config.hidden_size // hf_config.num_attention_heads,
        rms_norm_eps=float(hf_config.rms_norm_eps),
        rope=_rope(hf_config),
        max_position_embeddings=hf_config.max_position_embeddings,
        bias="qkvo" if attention_bias else "none" if has_bias_key else "qkv",
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_word_embeddings=bool(hf_config.tie_word_embeddings),
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        dtype=_dtype(hf_config),
    )


def _refuse_sliding_window(hf_config: Any) -> None:
    layer_types = getattr(hf_config, "layer_types", None) or []
    windowed = (
        getattr(hf_config, "use_sliding_window", False)
        and hf_config.max_window_layers < hf_config.num_hidden_layers
    )
    if windowed or any(kind != "full_attention" for kind in layer_types):
        raise ValueError("sliding-window layers are in use; allowed: full attention in every layer")


def _rope(hf_config: Any) -> Rope:
    """Both spellings: rope_parameters (transformers 5), rope_theta with rope_scaling (4)."""
    values = dict(getattr(hf_config, "rope_parameters", None) or {})
    if not values:
        values = {"rope_theta": hf_config.rope.theta, **(hf_config.rope_scaling or {})}
    legacy_type = values.pop("type", "default")
    rope_type = values.pop("rope_type", None) or legacy_type
    theta = float(values.pop("rope_theta"))
    if values.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not 1; allowed: rotation of the whole head")
    if rope_type == "default":
        return Rope(theta)
    if (original := getattr(hf_config, "original_max_position_embeddings", None)) is not None:
        # At the top of config.json it has priority in transformers, too.
        values["original_max_position_embeddings"] = original
    if rope_type == "yarn" and values.get("factor") is None:
        original = values["original_max_position_embeddings"]
        values["factor"] = hf_config.max_position_embeddings / original
    used = _ROPE_FIELDS[rope_type]
    given = {k: v for k, v in values.items() if k in used and v is not None}
    return Rope(theta, rope_type, **{"factor": 0.0, **given})


def _dtype(hf_config: Any) -> torch.dtype:
    dtype = hf_config.dtype if hasattr(hf_config, "dtype") else hf_config.torch_dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), dtype)
    return dtype or torch.float32


def _generation_eos(file: Path) -> tuple[int, ...]:
    return _token_ids(_read_json(file).get("eos_token_id")) if file.exists() else ()


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
