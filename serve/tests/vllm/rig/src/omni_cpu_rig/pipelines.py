# SPDX-License-Identifier: Apache-2.0
"""The tiny pipelines.

- ``tinyomni``: language model -> waveform
- ``tinyomni3``: language model -> language model -> waveform
- ``tinyomni_kv``: language model -> diffusion stage, with KV cache transfer
- ``tinyomni_moe``: ``tinyomni`` with a mixture of experts
- ``tinyomni_bulk``: ``tinyomni`` that sends as many bytes with each request as the benchmark wants
"""

from __future__ import annotations

import dataclasses

from vllm_omni.config.stage_config import PipelineConfig, StageExecutionType, StagePipelineConfig

_HOOKS = "omni_cpu_rig.processors"
_THINKER = StagePipelineConfig(
    stage_id=0,
    model_stage="thinker",
    execution_type=StageExecutionType.LLM_AR,
    input_sources=(),
    final_output=True,
    final_output_type="text",
    owns_tokenizer=True,
    engine_output_type="latent",
    sampling_constraints={"detokenize": True},
)
_CODE2WAV = StagePipelineConfig(
    stage_id=1,
    model_stage="code2wav",
    execution_type=StageExecutionType.LLM_GENERATION,
    input_sources=(0,),
    final_output=True,
    final_output_type="audio",
    engine_output_type="audio",
    model_arch="TinyOmniCode2Wav",
    sync_process_input_func=f"{_HOOKS}.placeholder_wav_prompt",
    sampling_constraints={"detokenize": False},
    requires_full_payload_input=True,
)
_TWO_STAGES = PipelineConfig(
    model_type="tinyomni",
    model_arch="TinyOmniThinker",
    stages=(
        dataclasses.replace(
            _THINKER,
            custom_process_next_stage_input_func=f"{_HOOKS}.codes_and_hidden_full_payload",
            async_chunk_process_next_stage_input_func=f"{_HOOKS}.codes_async_chunk",
        ),
        _CODE2WAV,
    ),
)
_THREE_STAGES = PipelineConfig(
    model_type="tinyomni3",
    model_arch="TinyOmniThinker",
    stages=(
        dataclasses.replace(
            _THINKER,
            custom_process_next_stage_input_func=f"{_HOOKS}.hidden_full_payload",
            async_chunk_process_next_stage_input_func=f"{_HOOKS}.hidden_async_chunk",
        ),
        StagePipelineConfig(
            stage_id=1,
            model_stage="talker",
            execution_type=StageExecutionType.LLM_AR,
            input_sources=(0,),
            engine_output_type="latent",
            model_arch="TinyOmniTalker",
            sync_process_input_func=f"{_HOOKS}.placeholder_talker_prompt",
            custom_process_next_stage_input_func=f"{_HOOKS}.codes_and_hidden_full_payload",
            async_chunk_process_next_stage_input_func=f"{_HOOKS}.codes_async_chunk",
            sampling_constraints={"detokenize": True},
            requires_full_payload_input=True,
        ),
        dataclasses.replace(_CODE2WAV, stage_id=2, input_sources=(1,)),
    ),
)
_KV = PipelineConfig(
    model_type="tinyomni_kv",
    model_arch="TinyOmniThinker",
    stages=(
        dataclasses.replace(
            _THINKER,
            custom_process_next_stage_input_func=f"{_HOOKS}.condition_full_payload",
            omni_kv_config={"need_send_cache": True},
        ),
        StagePipelineConfig(
            stage_id=1,
            model_stage="dit",
            execution_type=StageExecutionType.DIFFUSION,
            input_sources=(0,),
            final_output=True,
            final_output_type="audio",
            model_arch="TinyDiTPipeline",
            custom_process_input_func=f"{_HOOKS}.diffusion_prompt",
            stage_input_payload_keys=("cond",),
            omni_kv_config={"need_recv_cache": True},
        ),
    ),
)
_BULK = dataclasses.replace(
    _TWO_STAGES,
    model_type="tinyomni_bulk",
    stages=(
        dataclasses.replace(
            _TWO_STAGES.stages[0],
            custom_process_next_stage_input_func=f"{_HOOKS}.bulk_full_payload",
            async_chunk_process_next_stage_input_func=f"{_HOOKS}.bulk_async_chunk",
        ),
        _CODE2WAV,
    ),
)
_MOE = dataclasses.replace(_TWO_STAGES, model_type="tinyomni_moe", model_arch="TinyOmniThinkerMoe")
_MODELS = {
    "TinyOmniThinker": "omni_cpu_rig.models:Thinker",
    "TinyOmniTalker": "omni_cpu_rig.models:Talker",
    "TinyOmniCode2Wav": "omni_cpu_rig.models:Code2Wav",
    "TinyOmniThinkerMoe": "omni_cpu_rig.moe_model:ThinkerMoe",
}


def register_pipelines() -> None:
    """Register the models and pipelines with vllm and vllm-omni."""
    from vllm.model_executor.models import ModelRegistry
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES, register_pipeline
    from vllm_omni.diffusion.registry import register_diffusion_model
    from vllm_omni.model_executor.models.registry import OmniModelRegistry

    for registry in (ModelRegistry, OmniModelRegistry):
        for architecture, path in _MODELS.items():
            if architecture not in registry.models:
                registry.register_model(architecture, path)
    for pipeline in (_TWO_STAGES, _THREE_STAGES, _KV, _MOE, _BULK):
        if pipeline.model_type not in OMNI_PIPELINES:
            register_pipeline(pipeline)
    register_diffusion_model(
        "TinyDiTPipeline", "omni_cpu_rig.diffusion", "TinyDiTPipeline", post_process_func_name="keep_output"
    )
