"""What is asked in the recording, and what the scripted model answers."""

import json


def call(name: str, /, **arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


RULES = {
    "Say hello.": "Hello there, my friend!",
    "Count to nine.": "one two three four five six seven eight nine",
    "Be loud.": '# Title\n\n* ünïcode ✓ 漢字 😀\n* "quotes" \\ and <b>tags</b>\n',
    "Say nothing.": "",
    "What is the sky like?": "<think>\nThey ask about the sky.\n</think>\n\nIt is blue.",
    "the weather in Paris?": call("weather", city="Paris"),
    "the weather in Paris and Rome?": "I look.\n"
    + call("weather", city="Paris")
    + "\n"
    + call("weather", city="Rome"),
    "Think about the weather in Oslo": "<think>\nI need a tool.\n</think>\n\n" + call("weather", city="Oslo"),
    "Break the call.": '<tool_call>\n{"name": "weather", "arguments": {"city": "Par\n</tool_call>',
    "Call what is not there.": call("nothing", here=[1, None, {"deep": "x"}]),
    "21 degrees": "It is 21 degrees there.",
    "5 degrees": "<think>\nThat is cold.\n</think>\n\nTake a coat.",
    "Who wrote the first program?": '{"name": "Ada", "age": 36}',
}

WRONG_VALUES = """\
max_tokens max_output_tokens n stop temperature top_p top_k seed logprobs top_logprobs stream stream_options
tools tool_choice response_format text thinking metadata user prompt_cache_key prompt_cache_options
prompt_cache_retention cache_salt cache priority timeout logit_bias min_tokens guided_json structured_outputs
messages prompt input system contents toolConfig generationConfig
"""
"""Fields that are sent with values of every type."""

FIELDS = """\
_responseJsonSchema addGenerationPrompt add_generation_prompt add_special_tokens agent_reference
allowedTokenIds allowed_token_ids anthropic_beta anthropic_version audio audioTimestamp audio_timestamp
background badWords bad_words banEosToken ban_eos_token bannedStrings bannedTokens banned_strings
banned_tokens bestOf best_of betas bootstrapHost bootstrapPort bootstrapRoom bootstrap_host bootstrap_port
bootstrap_room cache cachePrompt cacheSalt cache_control cache_prompt cache_salt cachedContent
candidateCount candidate_count cfgScale cfg_scale chatTemplate chatTemplateKwargs chat_template
chat_template_kwargs clientMetadata client_metadata container contents context_management
continue_final_message continuous_usage_stats conversation customLogitProcessor customParams
customTokenBans custom_logit_processor custom_params custom_token_bans dataParallelRank data_parallel_rank
deferred diagnostics diversityPenalty diversity_penalty doSample do_sample documents dryAllowedLength
dryBase dryMultiplier dryPenaltyLastN drySequenceBreakers dry_allowed_length dry_base dry_multiplier
dry_penalty_last_n dry_sequence_breakers dynatempExponent dynatempRange dynatemp_exponent dynatemp_range
earlyStopping early_stopping ebnf ecTransferParams ec_transfer_params echo effort enableAffectiveDialog
enableEnhancedCivicAnswers enableSearch enableThinking enable_affective_dialog
enable_enhanced_civic_answers enable_response_messages enable_search enable_thinking
encoderRepetitionPenalty encoder_repetition_penalty epsilonCutoff epsilon_cutoff etaCutoff eta_cutoff
extraBody extra_body format frequencyPenalty frequency_penalty functionCall function_call functions
generateContentRequest generate_summary generationConfig grammar grammarString grammar_string
guidanceScale guidance_scale guidedChoice guidedDecodingBackend guidedGrammar guidedJson guidedRegex
guidedWhitespacePattern guided_choice guided_decoding_backend guided_grammar guided_json guided_regex
guided_whitespace_pattern idSlot id_slot ignoreEos ignore_eos imageConfig image_config include
includeThoughts include_obfuscation include_reasoning include_stop_str_in_output include_usage
inference_geo input inputEmbeds inputIds input_embeds input_ids instructions jsonSchema json_schema
keepAlive keep_alive kvTransferParams kv_transfer_params labels lengthPenalty length_penalty logitBias
logit_bias logitsProcessors logits_processors logprobTokenIds logprob_token_ids logprobs loraPath
lora_path maxCompletionTokens maxLength maxNewTokens maxOutputTokens maxTokens maxTokensToSample
max_completion_tokens max_length max_new_tokens max_output_tokens max_tokens max_tokens_to_sample
max_tool_calls mcp_servers mediaIoKwargs mediaResolution media_io_kwargs media_resolution messages
metadata minLength minNewTokens minP minTokens min_length min_new_tokens min_p min_tokens mirostat
mirostatEta mirostatMode mirostatTau mirostat_eta mirostat_mode mirostat_tau mmPayload mmProcessorKwargs
mm_payload mm_processor_kwargs modalities modelConfig modelSelectionConfig model_config
model_selection_config models moderation n nPredict n_predict negativePrompt negative_prompt
noRepeatNgramSize noStopTrim no_repeat_ngram_size no_stop_trim numBeamGroups numBeams numPredict
numReturnSequences num_beam_groups num_beams num_predict num_return_sequences options output_config
output_format parallel_tool_calls penaltyAlpha penalty_alpha plugins prediction presencePenalty
presence_penalty previous_input_messages previous_response_id priority prompt promptCacheKey
promptCacheOptions promptCacheRetention promptEmbeds promptLogprobs prompt_cache_key prompt_cache_options
prompt_cache_retention prompt_embeds prompt_logprobs provider randomSeed random_seed reasoning
reasoningEffort reasoningFormat reasoning_effort reasoning_format regex repPen rep_pen repeatPenalty
repeat_penalty repetitionDetection repetitionPenalty repetition_detection repetition_penalty requestId
request_id responseFormat responseJsonSchema responseLogprobs responseMimeType responseModalities
responseSchema response_format response_json_schema response_logprobs response_mime_type
response_modalities response_schema returnHiddenStates returnMmKwargs returnPromptText returnTokenOffsets
return_hidden_states return_mm_kwargs return_prompt_text return_token_ids return_token_offsets
return_token_strs return_tokens_as_token_ids rid route routedExpertsPromptStart
routed_experts_prompt_start routingConfig routing_config safePrompt safe_prompt safetySettings
safety_identifier safety_settings samplers samplingParams samplingSeed sampling_params sampling_seed
searchParameters search_parameters seed separateReasoning separate_reasoning serviceTier service_tier
sessionParams session_params skip_special_tokens smoothingFactor smoothing_factor
spacesBetweenSpecialTokens spaces_between_special_tokens speechConfig speech_config speed stop stopRegex
stopSequences stopTokenIds stopWords stop_regex stop_sequences stop_token_ids stop_words store stream
streamReasoning stream_obfuscation stream_options stream_reasoning structuralTag structural_tag
structuredOutputs structured_outputs suffix summary system systemInstruction temperature text tfs tfsZ
tfs_z think thinking thinkingBudget thinkingConfig thinkingLevel thinkingTokenBudget thinking_budget
thinking_config thinking_level thinking_token_budget thread timeout toolChoice toolConfig tool_choice
tools topA topK topLogprobs topNSigma topP top_a top_k top_logprobs top_n_sigma top_p transforms
translationConfig translation_config truncate_prompt_tokens truncation truncation_side typP typ_p typical
typicalP typical_p usage useBeamSearch use_beam_search user user_profile_id verbosity vllmXargs vllm_xargs
watermarking webSearchOptions web_search_options xtcProbability xtcThreshold xtc_probability xtc_threshold
"""
"""All fields that any dialect honours, passes over or refuses."""
