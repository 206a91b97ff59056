// What the threads of a forward pass share, and the table of functions that each instruction set fills.
#pragma once
#include <atomic>

#include "layout.h"
#include "team.h"

// Values of ISA, which each kernels_*.cpp defines. Each has all of the one before. (The compiler's own macros do not follow
// its pragma.)
#define BASE 0
#define AVX2 1    // and FMA, F16C
#define AVX512 2  // and BF16
#define AMX 3     // and its BF16

// What one thread does at a time: some queries of one KV head of one chunk. Row r is query head r % group of token
// r / group, where `group` query heads share a KV head.
struct AttentionUnit {
  int32_t span, kv_head, first_row, num_rows;
};

constexpr long MAX_UNIT_ROWS = 128;

struct AttentionHeads {  // of attention called alone
  int64_t heads, kv_heads, head_dim, layer, window;
  float scale, softcap;
};

// Buffers are [max tokens of a step][ld], rows padded to 32 numbers that stay zero. T: bf16, or fp32 in an fp32 model.
struct Runtime {
  const Model* model = nullptr;
  Cache cache = {};
  Team* team = nullptr;
  const Step* step = nullptr;

  float* x = nullptr;      // residual stream, fp32 in both
  float* sum = nullptr;    // what goes through a norm before it is added
  void* a = nullptr;       // T, normalized input of a product
  float* qkv = nullptr;
  void* q = nullptr;       // T
  void* o = nullptr;       // T, output of attention
  void* h = nullptr;       // T, inner of the MLP
  float* turns = nullptr;  // [token][2 tables][cosines, sines]
  long ld_x = 0, ld_qkv = 0, ld_o = 0, ld_h = 0;
  uint8_t* scratch = nullptr;
  long scratch_bytes = 0;  // of a thread

  int64_t *positions = nullptr, *span_of = nullptr;  // of a row
  std::vector<AttentionUnit> unit_memory;
  const AttentionUnit* units = nullptr;
  long num_units = 0;
  alignas(64) std::atomic<long> next_unit{0};

  const int64_t* rows = nullptr;  // of logits
  long num_rows = 0;
  float* logits = nullptr;

  AttentionHeads heads = {};
};

struct Product {
  const Matrix* matrix;
  const void* a;
  long num_rows;
  float* out;
  Team* team;
  uint8_t* scratch;
  long scratch_bytes;
};

struct Kernels {  // of two functions the first computes in bf16, the second in fp32
  Team::Function forward[2], logits[2], product[2], attention[2];
  void (*unpack)(const Matrix*, int64_t row, float* out);
};
