// Plain data shared by the Python side (ctypes) and the kernels. Every field is 8 bytes wide, so no padding differs.
//
// Weights are packed in panels of 32 outputs and steps of 32 inputs, in the order in which a matrix unit reads them:
//
//   bf16   [panel][step][2 tiles][16 input pairs][16 outputs][2 inputs]          2,048 bytes a record (panel, step)
//   fp32   [panel][step][32 inputs][32 outputs]                                  4,096
//   int8   [panel][step] tile 0, tile 1: 512 bytes each, then scales (and minima) 1,024 + 64 for each vector
//   int4   [panel][step] tile 0, tile 1: 256 bytes each, then scales (and minima)   512 + 64 for each vector
//
// A tile of 512 quantized weights is 32 vectors of 16 lanes. Vector v holds inputs 2r and 2r + 1 (r = v / 2) of outputs
// 8h .. 8h + 7 (h = v % 2), lane l being output 8h + l / 2, input 2r + l % 2: as in the bf16 tile. Dword l of the i-th 64
// bytes holds lane l of vectors 4i .. 4i + 3 (int8, one byte each) or 8i .. 8i + 7 (int4, lowest bits first).
// Scales: 32 fp16, one for each output of the panel, for 32 or twice for 16 inputs; each followed by 32 minima, if any.
// weight = scale * (byte - 128) + minimum, or scale * (nibble - 8), or with minima scale * nibble + minimum.
#pragma once
#include <cstdint>

enum Format : int64_t { F32 = 0, BF16 = 1, INT8 = 2, INT4 = 3 };
enum KvFormat : int64_t { KV_F32 = 0, KV_BF16 = 1, KV_INT8 = 2, KV_FP8 = 3 };

struct Matrix {
  int64_t format;
  int64_t rows;       // outputs
  int64_t columns;    // inputs
  int64_t group;      // inputs that share a scale: 16 or 32
  int64_t has_minima;
  const uint8_t* data;
  const float* bias;  // [rows rounded up to 32], or null
};

struct Layer {
  Matrix qkv, output, gate_up, down;  // gate_up: 16 outputs of gate, 16 of up, alternating
  const float *input_norm, *q_norm, *k_norm, *post_attention_norm, *mlp_norm, *post_mlp_norm;  // null: none
  int64_t window;      // tokens that a query sees, itself included; 0: all
  int64_t local_rope;  // 1: turns by the second table of frequencies
};

struct Model {
  int64_t num_layers, hidden, intermediate, heads, kv_heads, head_dim;
  int64_t is_f32;           // activations in fp32; else bf16
  int64_t gelu;             // activation: 1 gelu (tanh), 0 silu
  int64_t max_tokens;       // of a step
  double eps, embedding_scale, query_scale, attention_softcap, logit_softcap;
  const float *frequencies, *local_frequencies;  // [head_dim / 2]
  const float* norm;
  Matrix embedding, head;
  const Layer* layers;
};

struct Cache {
  uint8_t* data;
  int64_t format;
  int64_t block_bytes, layer_bytes, kv_bytes, head_bytes, row_bytes;  // strides
  int64_t block_size;  // tokens
};

// One chunk of a step: tokens at positions start .. start + num_tokens - 1 in rows first_row ..
struct Span {
  int64_t first_row, num_tokens, start;
  int64_t first_block;  // index into Step::blocks
};

struct Step {
  int64_t num_tokens, num_spans;
  const Span* spans;
  const int32_t* token_ids;
  const int32_t* blocks;
};
