// Every op as C++ sees it: shape and type of each argument. The schemas stand in python/albatross/ops (so that the ops exist
// without this library too); bindings.cpp registers these functions as their CUDA implementations.
#pragma once

#include <torch/csrc/stable/tensor.h>

namespace albatross {

using torch::stable::Tensor;

// One token a row: S = S diag(d) + (S a) b^T + v k^T, y = S r.
void wkv7_decode(
    const Tensor& state,  // [S, H, 64 value, 64 key] fp16 | fp32, any 16-byte stride(0), contiguous within a slot; mutated
    const Tensor& r,      // [B, H, 64] fp16 | fp32
    const Tensor& w,      // [B, H, 64] as r; raw decay logit
    const Tensor& k,      // [B, H, 64] as r
    const Tensor& v,      // [B, H, 64] as r
    const Tensor& a,      // [B, H, 64] as r
    const Tensor& b,      // [B, H, 64] as r
    const Tensor& slots,  // [B] int32; negative: padding
    const Tensor& y);     // [B, H, 64] as r; mutated

// One packed sequence a row: row i is tokens cu_seqlens[i] : cu_seqlens[i + 1].
void wkv7_prefill(
    const Tensor& state,       // as above; mutated, rounded once after the last token
    const Tensor& r,           // [T, H, 64] fp16 | fp32
    const Tensor& w,           // [T, H, 64] as r; raw decay logit
    const Tensor& k,           // [T, H, 64] as r
    const Tensor& v,           // [T, H, 64] as r
    const Tensor& a,           // [T, H, 64] as r
    const Tensor& b,           // [T, H, 64] as r
    const Tensor& cu_seqlens,  // [R + 1] int32, rising, within [0, T]
    const Tensor& slots,       // [R] int32; negative: padding
    const Tensor& y);          // [T, H, 64] as r; mutated

}  // namespace albatross
