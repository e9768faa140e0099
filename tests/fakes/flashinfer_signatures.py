"""The signatures of what kvrelay calls in FlashInfer, recorded from two releases: the oldest allowed, the newest read.

A name with `=` has a default; after `*` names are keyword-only. Where a release takes `**kwargs` and hands them on, the
signature that they reach is recorded.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

RECORDED: dict[str, dict[str, str]] = {
    "0.6.0": {
        "BatchDecodeWithPagedKVCacheWrapper.__init__": (
            "float_workspace_buffer kv_layout= use_cuda_graph= use_tensor_cores= paged_kv_indptr_buffer= "
            "paged_kv_indices_buffer= paged_kv_last_page_len_buffer= backend= jit_args="
        ),
        "BatchDecodeWithPagedKVCacheWrapper.plan": (
            "indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size pos_encoding_mode= window_left= "
            "logits_soft_cap= q_data_type= kv_data_type= o_data_type= data_type= sm_scale= rope_scale= rope_theta= "
            "non_blocking= block_tables= seq_lens= fixed_split_size= disable_split_kv="
        ),
        "BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer": "float_workspace_buffer int_workspace_buffer",
        "BatchDecodeWithPagedKVCacheWrapper.run": (
            "q paged_kv_cache *args q_scale= k_scale= v_scale= out= lse= return_lse= enable_pdl= window_left= sinks= "
            "q_len_per_req="
        ),
        "BatchPrefillWithPagedKVCacheWrapper.__init__": (
            "float_workspace_buffer kv_layout= use_cuda_graph= qo_indptr_buf= paged_kv_indptr_buf= "
            "paged_kv_indices_buf= paged_kv_last_page_len_buf= custom_mask_buf= mask_indptr_buf= backend= jit_args= "
            "jit_kwargs="
        ),
        "BatchPrefillWithPagedKVCacheWrapper.plan": (
            "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk "
            "page_size head_dim_vo= custom_mask= packed_custom_mask= causal= pos_encoding_mode= "
            "use_fp16_qk_reduction= sm_scale= window_left= logits_soft_cap= rope_scale= rope_theta= q_data_type= "
            "kv_data_type= o_data_type= non_blocking= prefix_len_ptr= token_pos_in_items_ptr= token_pos_in_items_len= "
            "max_item_len_ptr= seq_lens= seq_lens_q= block_tables= max_token_per_sequence= max_sequence_kv= "
            "fixed_split_size= disable_split_kv="
        ),
        "BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer": "float_workspace_buffer int_workspace_buffer",
        "BatchPrefillWithPagedKVCacheWrapper.run": (
            "q paged_kv_cache *args q_scale= k_scale= v_scale= out= lse= return_lse= enable_pdl= window_left= sinks="
        ),
        "append_paged_kv_cache": (
            "append_key append_value batch_indices positions paged_kv_cache kv_indices kv_indptr kv_last_page_len "
            "kv_layout="
        ),
    },
    "0.7.2.post1": {
        "BatchDecodeWithPagedKVCacheWrapper.__init__": (
            "float_workspace_buffer kv_layout= use_cuda_graph= use_tensor_cores= paged_kv_indptr_buffer= "
            "paged_kv_indices_buffer= paged_kv_last_page_len_buffer= backend= jit_args="
        ),
        "BatchDecodeWithPagedKVCacheWrapper.plan": (
            "indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size * pos_encoding_mode= "
            "window_left= window_right= logits_soft_cap= q_data_type= kv_data_type= o_data_type= data_type= sm_scale= "
            "rope_scale= rope_theta= non_blocking= block_tables= seq_lens= fixed_split_size= disable_split_kv= "
            "q_len_per_req= is_causal="
        ),
        "BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer": "float_workspace_buffer int_workspace_buffer",
        "BatchDecodeWithPagedKVCacheWrapper.run": (
            "q paged_kv_cache *args q_scale= k_scale= v_scale= out= lse= return_lse= enable_pdl= window_left= sinks= "
            "q_len_per_req= skip_softmax_threshold_scale_factor= kv_cache_sf="
        ),
        "BatchPrefillWithPagedKVCacheWrapper.__init__": (
            "float_workspace_buffer kv_layout= use_cuda_graph= qo_indptr_buf= paged_kv_indptr_buf= "
            "paged_kv_indices_buf= paged_kv_last_page_len_buf= custom_mask_buf= mask_indptr_buf= backend= jit_args= "
            "jit_kwargs= variant_owns_mask="
        ),
        "BatchPrefillWithPagedKVCacheWrapper.plan": (
            "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk "
            "page_size head_dim_vo= custom_mask= packed_custom_mask= causal= pos_encoding_mode= "
            "use_fp16_qk_reduction= sm_scale= window_left= logits_soft_cap= rope_scale= rope_theta= q_data_type= "
            "kv_data_type= o_data_type= non_blocking= prefix_len_ptr= token_pos_in_items_ptr= token_pos_in_items_len= "
            "max_item_len_ptr= seq_lens= seq_lens_q= block_tables= max_token_per_sequence= max_sequence_kv= "
            "fixed_split_size= disable_split_kv= uniform_q_len="
        ),
        "BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer": "float_workspace_buffer int_workspace_buffer",
        "BatchPrefillWithPagedKVCacheWrapper.run": (
            "q paged_kv_cache *args q_scale= k_scale= v_scale= out= lse= return_lse= lse_base= lse_layout= enable_pdl= "
            "window_left= sinks= kv_cache_sf= skip_softmax_threshold_scale_factor= use_fp16_softmax= uses_spcompress="
        ),
        "append_paged_kv_cache": (
            "append_key append_value batch_indices positions paged_kv_cache kv_indices kv_indptr kv_last_page_len "
            "kv_layout="
        ),
    },
}


@cache
def parse(text: str) -> inspect.Signature:
    """The signature that a recorded text stands for; defaults are None."""
    parameters: list[inspect.Parameter] = []
    keyword_only = False
    for word in text.split():
        if word.startswith("*"):
            if word != "*":
                parameters.append(inspect.Parameter(word[1:], inspect.Parameter.VAR_POSITIONAL))
            keyword_only = True
            continue
        kind = inspect.Parameter.KEYWORD_ONLY if keyword_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = None if word.endswith("=") else inspect.Parameter.empty
        parameters.append(inspect.Parameter(word.rstrip("="), kind, default=default))
    return inspect.Signature(parameters)


def describe(signature: inspect.Signature) -> str:
    """The text that stands for a signature; `self` is left out."""
    words, keyword_only = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            words.append(f"*{parameter.name}")
            keyword_only = True
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            words.append("*")
            keyword_only = True
        if parameter.name != "self":
            words.append(parameter.name + ("" if parameter.default is parameter.empty else "="))
    return " ".join(words)


def check_call(name: str, *args: Any, **kwargs: Any) -> None:
    """Raises TypeError where a recorded release would not take the call."""
    for version, signatures in RECORDED.items():
        try:
            bound = parse(signatures[name]).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"FlashInfer {version}: {name}: {error}") from None
        if bound.arguments.get("args"):
            raise TypeError(f"FlashInfer {version}: {name} takes further positional arguments for kernels of one's own")
