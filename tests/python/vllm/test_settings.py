"""vLLM's own settings, its environment and the instruction set, each with its effect on a name."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import vllm
from plugin_support.configs import offloading_config
from plugin_support.models import Config, kv_cache_config, make_model, vllm_config
from vllm.config import AttentionConfig, LoRAConfig, MultiModalConfig

import kvstrata
from kvstrata.vllm import facts, manifest, modelconfig

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    not hasattr(kvstrata, "_native"), reason="kvstrata._native is not built"
)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_model(tmp_path / "my-model")


def gathered(
    model_dir: Path,
    *,
    attention: dict[str, Any] | None = None,
    media: dict[str, Any] | None = None,
    adapters: dict[str, Any] | None = None,
    state_spaces: dict[str, Any] | None = None,
    platform: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The facts of a configuration whose parts are vLLM's own objects."""
    config = vllm_config(model_dir, lora=LoRAConfig(**(adapters or {})))
    config.attention_config = AttentionConfig(**(attention or {}))
    config.model_config.multimodal_config = MultiModalConfig(**(media or {}))
    # A double: vLLM refuses this setting on a processor.
    chosen = {"enable_stochastic_rounding": False, **(state_spaces or {})}
    config.mamba_config = SimpleNamespace(**chosen)
    config.additional_config = platform or {}
    return facts.gather(config, kv_cache_config())


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [field for field, _, _ in kvstrata.manifest_differences(a, b)]


SETTINGS: dict[str, dict[str, Any]] = {
    "attention.settings.use_non_causal": {"attention": {"use_non_causal": True}},
    "attention.settings.indexer_kv_dtype": {"attention": {"indexer_kv_dtype": "mxfp4"}},
    "attention.settings.flash_attn_version": {"attention": {"flash_attn_version": 2}},
    "attention.settings.use_prefill_query_quantization": {
        "attention": {"use_prefill_query_quantization": True}
    },
    "media.mm_processor_kwargs": {"media": {"mm_processor_kwargs": {"max_pixels": 50176}}},
    "media.media_io_kwargs.video": {"media": {"media_io_kwargs": {"video": {"num_frames": 8}}}},
    "media.video_pruning_rate": {"media": {"video_pruning_rate": 0.5}},
    "media.mm_encoder_attn_dtype": {"media": {"mm_encoder_attn_dtype": "fp8"}},
    "adapters.target_modules": {"adapters": {"target_modules": ["q_proj"]}},
    "adapters.enable_tower_connector_lora": {"adapters": {"enable_tower_connector_lora": True}},
    "state_spaces.enable_stochastic_rounding": {
        "state_spaces": {"enable_stochastic_rounding": True}
    },
    "platform_options": {"platform": {"enable_kv_nz": True}},
}


@pytest.mark.parametrize("field", SETTINGS)
def test_a_setting_that_changes_bytes_is_a_fact(model_dir: Path, field: str) -> None:
    assert differences(gathered(model_dir), gathered(model_dir, **SETTINGS[field])) == [field]


FREE: dict[str, dict[str, Any]] = {
    "splits of a kernel": {"attention": {"flash_attn_max_num_splits_for_cuda_graph": 4}},
    "the cache of processed images": {"media": {"mm_processor_cache_gb": 1}},
    "the number of images a request may bring": {"media": {"limit_per_prompt": {"image": 3}}},
    "room for adapters": {"adapters": {"max_loras": 4, "max_lora_rank": 32}},
}


@pytest.mark.parametrize("what", FREE)
def test_a_setting_that_changes_none_is_not(model_dir: Path, what: str) -> None:
    assert gathered(model_dir) == gathered(model_dir, **FREE[what])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1"),
        ("VLLM_SSM_CONV_STATE_LAYOUT", "DS"),
        ("VLLM_MARLIN_INPUT_DTYPE", "fp8"),
        ("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "INT4"),
        ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random"),
    ],
)
def test_a_variable_that_chooses_a_layout_or_a_precision_is_a_fact(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    before = gathered(model_dir)
    monkeypatch.setenv(name, value)
    assert differences(before, gathered(model_dir)) == [f"environment.{name}"]


def test_a_variable_at_its_default_is_as_one_that_is_not_set(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = gathered(model_dir)
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "NHD")
    assert gathered(model_dir) == before


def test_the_instruction_set_that_orders_a_block_is_a_fact(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = gathered(model_dir)
    had = torch.cpu._is_amx_tile_supported()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: not had)
    assert differences(before, gathered(model_dir)) == ["attention.hardware.amx"]


def test_one_block_has_other_bytes_under_another_instruction_set() -> None:
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("this processor has one instruction set that vLLM orders blocks for")
    from vllm import _custom_ops as ops

    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("this vLLM has no compiled kernels")
    keys = torch.arange(32 * 2 * 64, dtype=torch.float32).to(torch.bfloat16).view(32, 2, 64)
    found = []
    for instructions in ("amx", "vec"):
        blocks = torch.zeros(2, 2, 32, 128, dtype=torch.bfloat16)
        halves = blocks.view(2, 2, 64, -1).chunk(2, dim=2)
        slots = torch.arange(32, dtype=torch.int64)
        more = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": "auto"}
        ops.cpu_attn_reshape_and_cache(keys, keys, *halves, slots, instructions, **more)
        found.append(blocks)
    assert not torch.equal(*found)
    assert torch.equal(*(blocks.flatten().float().sort()[0] for blocks in found))


def test_the_scales_of_an_encoder_count_by_their_content_not_by_their_place(
    model_dir: Path, tmp_path: Path
) -> None:
    from kvstrata.vllm import settings

    found = []
    for name, text in (("a.json", "{}"), ("b.json", "{}"), ("b.json", "[]")):
        (tmp_path / name).write_text(text)
        media = SimpleNamespace(mm_encoder_fp8_scale_path=str(tmp_path / name))
        found.append(settings.of_media(SimpleNamespace(multimodal_config=media)))
    assert found[0] == found[1] != found[2]


def test_a_draft_model_counts_with_its_type_quantisation_and_loader(model_dir: Path) -> None:
    def draft(load_format: str = "auto", **over: Any) -> Any:
        model = vllm_config(model_dir, model=over).model_config
        load = SimpleNamespace(load_format=load_format)
        speculative = SimpleNamespace(
            method="eagle", draft_model_config=model, draft_load_config=load
        )
        config = vllm_config(model_dir, speculative=speculative)
        return facts.gather(config, kv_cache_config())

    base = draft()
    assert differences(base, draft(dtype=torch.float16)) == ["draft.dtype"]
    assert differences(base, draft(quantization="fp8")) == ["draft.quantization"]
    assert differences(base, draft(load_format="pt")) == ["draft.weights.loading.format"]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1 << 70, "\ud800", {"\ud800": 1}])
def test_what_json_lacks_is_spelt_out(value: object) -> None:
    digest = kvstrata.manifest_digest({"model": "m", "value": modelconfig.plain(value)})
    assert digest == kvstrata.manifest_digest({"model": "m", "value": modelconfig.plain(value)})
    assert digest != kvstrata.manifest_digest({"model": "m", "value": modelconfig.plain("inf")})


def test_a_name_of_generation_means_something_else_inside_a_part_of_the_model() -> None:
    def relevant(**fields: Any) -> Any:
        return modelconfig.relevant(Config(**fields))

    assert relevant(router={"top_k": 2}) != relevant(router={"top_k": 4})
    assert relevant(top_k=2) == relevant(top_k=4)
    inner = [{"text_config": {"model_type": "m", "top_k": top_k}} for top_k in (2, 4)]
    assert relevant(**inner[0]) == relevant(**inner[1])


def test_functions_count_by_their_names() -> None:
    assert modelconfig.plain(make_model) == "plugin_support.models.make_model"


def bare() -> dict[str, Any]:
    """The manifest under a connector of vLLM's, which says nothing of the model."""
    made = offloading_config("engine", [])
    spec: Any = SimpleNamespace(
        config=made, extra_config=made.extra_config, replicated_layout=False
    )
    return manifest.build(spec, "mine")


def test_without_our_connector_release_device_and_environment_are_facts_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = bare()
    assert before["engine"]["version"] == vllm.__version__
    monkeypatch.setattr(vllm, "__version__", f"{vllm.__version__}.post1")
    assert differences(before, bare()) == ["engine.version"]
    monkeypatch.undo()
    for name, value in (
        ("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1"),
        ("VLLM_USE_V2_MODEL_RUNNER", "1"),
    ):
        monkeypatch.setenv(name, value)
        assert differences(before, bare()) == [f"environment.{name}"]
        monkeypatch.delenv(name)
    had = torch.cpu._is_amx_tile_supported()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: not had)
    assert differences(before, bare()) == ["attention.hardware.amx"]
