// Every op as C++ sees it: shape and type of each argument. The schemas stand in python/albatross/ops (so that the ops exist
// without this library too); bindings.cpp, or classic/module.cpp, registers these functions as their CUDA implementations.
#pragma once

#include "tensor.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace albatross {

// "fp" is fp16 or fp32, the same for all of a call. Rows of [T, C] may be any multiple of 8 elements apart.

// x_out = x + delta; y = LN(x_out) in fp; mixed[m] = y + (y of the token before - y) * mix[m]; shift becomes y of a row's last.
void add_norm_mix(
    const Tensor& x,                     // [T, C] fp32, contiguous, C a multiple of 64
    const std::optional<Tensor>& delta,  // [T, C] fp
    const Tensor& ln_weight,             // [C] fp32
    const Tensor& ln_bias,               // [C] fp32
    const Tensor& mix,                   // [M, C] fp, M from 1 to 8
    const Tensor& shift,                 // [S, C] fp: y of the last token of each slot; mutated
    const Tensor& cu_seqlens,            // [R + 1] int32, rising, within [0, T]
    const Tensor& token_rows,            // [T] int32: the row of each token
    const Tensor& slots,                 // [R] int32; negative: padding
    const Tensor& x_out,                 // [T, C] fp32, contiguous, apart from x; mutated
    const Tensor& mixed);                // [M, T, C] fp, contiguous; mutated

// out[i] = LN(x[index[i]] + delta[index[i]]).
void add_norm(
    const Tensor& x,                     // [T, C] fp32, contiguous
    const std::optional<Tensor>& delta,  // [T, C] fp
    const Tensor& ln_weight,             // [C] fp32
    const Tensor& ln_bias,               // [C] fp32
    const Tensor& index,                 // [K] int64, within [0, T)
    const Tensor& out);                  // [K, C] fp; mutated

// One token a row: all of time mixing between the products of its mixed inputs and the output matrix. Law: cuda/tmix_decode.cu.
void tmix_decode(
    const Tensor& state,                   // [S, H, 64 value, 64 key] fp16 | fp32, any 16-byte stride(0); mutated
    const Tensor& r,                       // [T, C] fp, as all up to v_first: raw products
    const Tensor& k,
    const Tensor& v,
    const Tensor& w,                       // without its bias, as a and v_gate
    const Tensor& a,
    const std::optional<Tensor>& v_gate,   // in layer 0 there is none of v_gate, v_first and v0
    const Tensor& g,
    const std::optional<Tensor>& v_first,
    const Tensor& w0,                      // [C] fp32, as all up to ln_bias but r_k
    const Tensor& a0,
    const std::optional<Tensor>& v0,
    const Tensor& k_k,
    const Tensor& k_a,
    const Tensor& r_k,                     // [H, 64] fp32
    const Tensor& ln_weight,
    const Tensor& ln_bias,
    const Tensor& slots,                   // [T] int32; negative: padding
    const Tensor& out);                    // [T, C] fp, zero for padding; mutated

// The same for one packed sequence a row: row i is tokens cu_seqlens[i] : cu_seqlens[i + 1]. Arguments as above but all fp16 that
// are fp there; tokens of no row, and those of padding, are left alone in out. Long rows may be split, into up to N parts in all.
void tmix_prefill(
    const Tensor& state,
    const Tensor& r,
    const Tensor& k,
    const Tensor& v,
    const Tensor& w,
    const Tensor& a,
    const std::optional<Tensor>& v_gate,
    const Tensor& g,
    const std::optional<Tensor>& v_first,
    const Tensor& w0,
    const Tensor& a0,
    const std::optional<Tensor>& v0,
    const Tensor& k_k,
    const Tensor& k_a,
    const Tensor& r_k,
    const Tensor& ln_weight,
    const Tensor& ln_bias,
    const Tensor& cu_seqlens,  // [R + 1] int32, rising, within [0, T]
    const Tensor& slots,       // [R] int32; negative: padding
    const Tensor& out,
    const std::optional<Tensor>& segments);  // [N, H, 2, 64, 64] fp32: what the parts hand on; mutated

// The part of it before the recurrence, for wkv7_prefill. Arguments as above.
void tmix_prepare(
    const Tensor& k,
    const Tensor& v,
    const Tensor& w,
    const Tensor& a,
    const std::optional<Tensor>& v_gate,
    const std::optional<Tensor>& v_first,
    const Tensor& w0,
    const Tensor& a0,
    const std::optional<Tensor>& v0,
    const Tensor& k_k,
    const Tensor& k_a,
    const Tensor& w_out,     // [T, C] fp, contiguous, as all below: the raw decay logit; mutated
    const Tensor& k_out,     // mutated
    const Tensor& v_out,     // mutated
    const Tensor& minus_kk,  // wkv7_prefill's a; mutated
    const Tensor& b);        // mutated

// The part of it after the recurrence.
void tmix_readout(
    const Tensor& y,          // [T, C] fp, of wkv7_prefill
    const Tensor& r,          // [T, C] fp
    const Tensor& k,          // [T, C] fp, of tmix_prepare
    const Tensor& v,          // [T, C] fp, of tmix_prepare
    const Tensor& g,          // [T, C] fp
    const Tensor& r_k,        // [H, 64] fp32
    const Tensor& ln_weight,  // [C] fp32
    const Tensor& ln_bias,    // [C] fp32
    const Tensor& out);       // [T, C] fp; mutated

// In place max(x, 0)^2; in fp16 (min(max(x, 0), CMIX_BOUND) * CMIX_SCALE)^2.
void squared_relu(const Tensor& x);  // fp, contiguous; mutated

// One packed sequence a row: row i is tokens cu_seqlens[i] : cu_seqlens[i + 1].
void wkv7_prefill(
    const Tensor& state,       // as in tmix_decode; mutated, rounded once after the last token
    const Tensor& r,           // [T, H, 64] fp16 | fp32
    const Tensor& w,           // [T, H, 64] as r; raw decay logit
    const Tensor& k,           // [T, H, 64] as r
    const Tensor& v,           // [T, H, 64] as r
    const Tensor& a,           // [T, H, 64] as r
    const Tensor& b,           // [T, H, 64] as r
    const Tensor& cu_seqlens,  // [R + 1] int32, rising, within [0, T]
    const Tensor& slots,       // [R] int32; negative: padding
    const Tensor& y);          // [T, H, 64] as r; mutated

// Up to 32 matrix products of at most 8 rows each: out = activation(x weight^T), sums in fp32. Entries of the lists belong together.
void grouped_linear(
    std::vector<Tensor> x,            // [T, K] fp16, rows any multiple of 8 numbers apart
    std::vector<Tensor> weight,       // [N, K] fp16
    std::vector<int64_t> activation,  // 0 none, 1 tanh, 2 sigmoid, 3 squared ReLU of CMIX_SCALE times the sum, clamped to CMIX_BOUND
    const Tensor& workspace,          // int32, zero when it is made; mutated, and the same again after every call
    std::vector<Tensor> out);         // [T, N] fp16 | fp32; mutated

// out = scale * x weight for x that is mostly zero, T at most 8: rows of the weight that meet zeros alone are not read.
void sparse_linear(
    const Tensor& x,          // [T, K] fp16
    const Tensor& weight,     // [K, N] fp16
    double scale,
    const Tensor& workspace,  // as above; mutated
    const Tensor& out);       // [T, N] fp16 | fp32; mutated

// Draws one id a row by the law and the tables of python/albatross/ops/sampling.py. M: edits a slot can hold, W: ceil(V / 32).
void sample(
    const Tensor& logits,       // [K, V] fp32, any stride(0), contiguous within a row
    const Tensor& slots,        // [K] int32; negative: padding
    const Tensor& records,      // [S, 16] int32; mutated: positions
    const Tensor& edit_ids,     // [S, M] int32
    const Tensor& edit_values,  // [S, M] fp32
    const Tensor& forbidden,    // [W] int32, bits
    const std::optional<Tensor>& allowed,  // [K, W] int32, bits
    const std::optional<Tensor>& counts,   // [S, V] fp32; mutated
    const Tensor& last_token,   // [S] int64; mutated
    const Tensor& drawn,        // [K] int64; mutated
    const Tensor& is_bad);      // [K] bool; mutated

}  // namespace albatross
