"""The names of vLLM that Kvasir reads, uses or implements, as data.

Owns the list; `version.py` checks it at a start, and a test compares it with what this folder imports. Pure.
"""

from collections.abc import Mapping

Reads = Mapping[str, Mapping[str, str]]
"""By module and object: the attributes of a class or an instance, or the parameters of a function."""

READS: Reads = {
    "vllm": {
        "EngineArgs": "model dtype max_model_len block_size num_gpu_blocks_override kv_cache_memory_bytes"
        " max_num_batched_tokens max_num_seqs enable_prefix_caching kv_events_config skip_tokenizer_init"
        " mm_processor_cache_gb limit_mm_per_prompt language_model_only max_logprobs generation_config"
        " scheduling_policy distributed_executor_backend async_scheduling enforce_eager disable_log_stats"
        " use_tqdm_on_load seed kv_transfer_config enable_lora max_loras max_cpu_loras max_lora_rank"
        " speculative_config tensor_parallel_size pipeline_parallel_size",
        "SamplingParams": "max_tokens min_tokens temperature top_p top_k min_p repetition_penalty"
        " presence_penalty frequency_penalty seed logit_bias stop_token_ids ignore_eos logprobs detokenize"
        " output_kind",
    },
    "vllm.config": {
        "KVEventsConfig": "enable_kv_cache_events publisher",
        "ModelConfig": "max_model_len get_vocab_size",
        "SpeculativeConfig": "",
        "VllmConfig": "model_config",
    },
    "vllm.config.lora": {"MaxLoRARanks": ""},
    "vllm.distributed": {"cleanup_dist_env_and_memory": ""},
    "vllm.distributed.kv_events": {
        "AllBlocksCleared": "",
        "BlockRemoved": "block_hashes medium group_idx",
        "BlockStored": "block_hashes parent_block_hash token_ids medium extra_keys group_idx session_id",
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {"KVConnectorBase_V1": "take_events reset_cache"},
    "vllm.envs": {"VLLM_ENABLE_V1_MULTIPROCESSING": "", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": ""},
    "vllm.exceptions": {"VLLMValidationError": ""},
    "vllm.inputs": {"TokensPrompt": "prompt_token_ids cache_salt"},
    "vllm.inputs.engine": {"mm_input": "cache_salt"},
    "vllm.logprobs": {"Logprob": "logprob rank"},
    "vllm.lora.request": {"LoRARequest": ""},
    "vllm.multimodal.image": {"convert_image_mode": ""},
    "vllm.multimodal.inputs": {
        "MultiModalFeatureSpec": "identifier mm_position",
        "MultiModalKwargsItems": "",
        "PlaceholderRange": "offset length",
    },
    "vllm.multimodal.processing": {
        "BaseMultiModalProcessor": "apply info",
        "BaseProcessingInfo": "parse_mm_data",
    },
    "vllm.multimodal.processing.context": {"TimingContext": ""},
    "vllm.multimodal.processing.inputs": {"ProcessorInputs": ""},
    "vllm.outputs": {
        "CompletionOutput": "token_ids finish_reason logprobs",
        "RequestOutput": "request_id outputs finished num_cached_tokens num_cache_creation_tokens",
    },
    "vllm.platforms": {"current_platform": "is_cpu is_cuda_alike device_name device_type"},
    "vllm.renderers": {"BaseRenderer": "get_mm_processor"},
    "vllm.sampling_params": {"RequestOutputKind": "DELTA", "StructuredOutputsParams": "grammar"},
    "vllm.v1.core.block_pool": {"BlockPool": "num_gpu_blocks get_num_free_blocks blocks hash_block_size"},
    "vllm.v1.core.kv_cache_coordinator": {
        "KVCacheCoordinator": "single_type_managers block_pool enable_partial_hash_hits scheduler_block_size"
        " retention_interval",
    },
    "vllm.v1.core.kv_cache_manager": {
        "KVCacheManager": "block_pool take_events kv_cache_config coordinator kv_cache_event_metadata",
    },
    "vllm.v1.core.kv_cache_utils": {
        "KVCacheBlock": "block_hash",
        "_gen_prompt_embeds_extra_hash_keys": "",
        "get_kv_cache_capacity": "",
    },
    "vllm.v1.core.sched.output": {
        "NewRequestData": "req_id",
        "SchedulerOutput": "scheduled_new_reqs preempted_req_ids scheduled_encoder_inputs"
        " num_scheduled_tokens scheduled_spec_decode_tokens",
    },
    "vllm.v1.core.sched.scheduler": {
        "Scheduler": "kv_event_publisher schedule structured_output_manager kv_cache_manager running requests"
        " connector has_requests max_num_scheduled_tokens waiting",
    },
    "vllm.v1.core.single_type_kv_cache_manager": {"SingleTypeKVCacheManager": "block_size use_eagle"},
    "vllm.v1.engine.core": {"EngineCore": "scheduler model_executor"},
    "vllm.v1.engine.core_client": {"InprocClient": "engine_core reset_encoder_cache shutdown"},
    "vllm.v1.engine.llm_engine": {
        "LLMEngine": "vllm_config engine_core renderer from_engine_args step abort_request add_lora"
        " reset_prefix_cache",
        "LLMEngine.add_request": "lora_request priority session_id",
    },
    "vllm.v1.executor.abstract": {"Executor": "register_failure_callback"},
    "vllm.v1.kv_cache_interface": {
        "ChunkedLocalAttentionSpec": "attention_chunk_size",
        "KVCacheConfig": "kv_cache_groups prefix_cache_retention_interval",
        "KVCacheGroupSpec": "kv_cache_spec",
        "KVCacheSpec": "prefix_cacheable",
    },
    "vllm.v1.metrics.stats": {"PrefillStats": "num_cached_tokens num_external_cached_tokens"},
    "vllm.v1.request": {
        "Request": "request_id session_id status cache_salt block_hashes all_token_ids mm_features"
        " num_tokens num_tokens_with_spec num_prompt_tokens num_computed_tokens num_preemptions"
        " prefill_stats shared_prefix_boundary spec_token_ids structured_output_request",
        "RequestStatus": "RUNNING WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
    },
    "vllm.v1.structured_output": {"StructuredOutputManager": "backend"},
    "vllm.v1.structured_output.backend_types": {
        "StructuredOutputBackend": "allocate_token_bitmask compile_grammar destroy",
        "StructuredOutputGrammar": "accept_tokens fill_bitmask is_terminated validate_tokens rollback reset",
    },
    "vllm.v1.structured_output.request": {"StructuredOutputRequest": "grammar"},
}

TIER_READS: Reads = {
    "vllm": {"__version__": ""},
    "vllm.platforms": {"current_platform": "get_device_capability"},
    "vllm.v1.kv_offload.base": {
        "CanonicalKVCacheTensor": "tensor page_size_bytes",
        "CanonicalKVCaches": "tensors",
        "GPULoadStoreSpec": "block_ids block_indices",
        "LookupResult": "HIT HIT_PENDING MISS",
        "OffloadingManager": "on_new_request on_schedule_end on_request_finished lookup get_load_source"
        " prepare_load complete_load prepare_store complete_store take_events reset_cache",
        "OffloadingSpec": "get_manager get_worker",
        "OffloadingWorker": "submit_store submit_load get_finished wait shutdown",
        "PrepareStoreOutput": "evicted_keys",
        "ReqContext": "req_id set_state get_state get_offload_key_position",
        "RequestOffloadingContext": "",
        "ScheduleEndContext": "new_req_ids",
        "TransferResult": "job_id success transfer_time",
    },
    "vllm.v1.kv_offload.config": {
        "OffloadingConfig": "engine_id groups kv_cache_layout model worker_kv_bytes_per_block",
        "OffloadingGroupConfig": "layer_names",
        "OffloadingModelConfig": "dtype",
    },
    "vllm.v1.kv_offload.cpu.common": {"CPULoadStoreSpec": "block_ids"},
    "vllm.v1.kv_offload.cpu.gpu_worker": {"CPUOffloadingWorker.__init__": "mmap_region"},
    "vllm.v1.kv_offload.cpu.host_register": {"host_unregister": ""},
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": "DISK HOST"},
}
"""Read besides with `host_kv_bytes`."""

RANK_READS: Reads = {"vllm.v1.worker.cpu_worker": {"CPUWorker": ""}}
"""Read besides by the processes of several ranks on a CPU, and imported by them alone."""
