// The C functions that Python calls. They do not throw; what can fail returns null or -1. Instruction sets are chosen here.
#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <string>

#include "runtime.h"

namespace headrace_base {
extern const Kernels kernels;
}
#if defined(__x86_64__)
namespace headrace_avx2 {
extern const Kernels kernels;
}
namespace headrace_avx512 {
extern const Kernels kernels;
}
namespace headrace_amx {
extern const Kernels kernels;
}
#endif

namespace {

struct Choice {
  const char* name;
  const Kernels* kernels;
};

#if defined(__x86_64__)
// Linux hands out the state of the tiles on request only, for the whole process.
bool tiles_allowed() {
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

bool has_amx() {
  unsigned a = 7, b = 0, c = 0, d = 0;
  asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return (d >> 22 & 1) && (d >> 24 & 1) && tiles_allowed();
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
}
#endif

std::vector<Choice> choices() {
  std::vector<Choice> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (has_avx512() && has_amx()) found.push_back({"amx", &headrace_amx::kernels});
  if (has_avx512()) found.push_back({"avx512_bf16", &headrace_avx512::kernels});
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    found.push_back({"avx2", &headrace_avx2::kernels});
#endif
  found.push_back({"base", &headrace_base::kernels});
  return found;
}

const std::vector<Choice>& supported() {
  static const std::vector<Choice> found = choices();
  return found;
}

const Choice* chosen = nullptr;

const Kernels& kernels() {
  if (chosen == nullptr) chosen = &supported().front();
  return *chosen->kernels;
}

long padded(long n) { return (n + 31) / 32 * 32; }

long record_bytes(const Matrix& m) {
  if (m.format == F32) return 4096;
  if (m.format == BF16) return 2048;
  return (m.format == INT8 ? 1024 : 512) + 64 * (32 / m.group) * (1 + m.has_minima);
}

long most_steps(const Model& model) {
  long most = std::max({model.hidden, model.heads * model.head_dim, model.intermediate});
  return padded(most) / 32;
}

long scratch_for(long steps, long head_dim) {
  long product = std::max(4 * 32 * 32 + 4096 * std::max(8L, steps), 4L * (128 * 32 + std::max(4 * 1024 + 8 * 4 * 32L, 96 * steps)));
  long depth = padded(head_dim);
  long attention = 4 * (MAX_UNIT_ROWS * (2 * depth + 64 + std::max(64L, depth) + 16 + 2) + (3 * 64 + 1) * depth);
  return (std::max(product, attention) + 4095) / 4096 * 4096;
}

uint8_t* aligned(size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 4096, std::max<size_t>(bytes, 4096)) != 0) return nullptr;
  memset(memory, 0, bytes);
  return (uint8_t*)memory;
}

// Units of attention, the longest first, so that none is left over at the end.
void divide(Runtime& run, const Step& step, long heads, long kv_heads) {
  const long group = heads / kv_heads;
  std::vector<AttentionUnit>& units = run.unit_memory;
  units.clear();
  for (long s = 0; s < step.num_spans; s++) {
    long rows = step.spans[s].num_tokens * group;
    for (long first = (rows - 1) / MAX_UNIT_ROWS * MAX_UNIT_ROWS; first >= 0; first -= MAX_UNIT_ROWS)
      for (long head = 0; head < kv_heads; head++)
        units.push_back({(int32_t)s, (int32_t)head, (int32_t)first, (int32_t)std::min(MAX_UNIT_ROWS, rows - first)});
  }
  auto cost = [&](const AttentionUnit& u) {
    const Span& span = step.spans[u.span];
    return (long)((u.num_rows + 15) / 16 + 1) * (span.start + (u.first_row + u.num_rows) / group);
  };
  std::stable_sort(units.begin(), units.end(),
                   [&](const AttentionUnit& a, const AttentionUnit& b) { return cost(a) > cost(b); });
  run.units = units.data();
  run.num_units = (long)units.size();
  run.next_unit = 0;
}

void free_buffers(Runtime& run) {
  for (void* buffer : {(void*)run.x, (void*)run.sum, run.a, (void*)run.qkv, run.q, run.o, run.h, (void*)run.turns,
                       (void*)run.scratch, (void*)run.positions, (void*)run.span_of})
    free(buffer);
}

// weight(row, column) into its place, bf16 or fp32.
template <typename T>
void pack_tensor(const Matrix& m, const T* weights, uint8_t* out) {
  const long steps = padded(m.columns) / 32;
  memset(out, 0, padded(m.rows) / 32 * steps * record_bytes(m));
  for (long row = 0; row < m.rows; row++)
    for (long column = 0; column < m.columns; column++) {
      T* record = (T*)(out + (row / 32 * steps + column / 32) * record_bytes(m));
      long k = column % 32, n = row % 32;
      record[sizeof(T) == 4 ? 32 * k + n : 512 * (n / 16) + 32 * (k / 2) + 2 * (n % 16) + k % 2] =
          weights[row * m.columns + column];
    }
}

}  // namespace

extern "C" {

// Names of the instruction sets that this processor has, best first, separated by spaces.
const char* headrace_instruction_sets() {
  static std::string names;
  names.clear();
  for (const Choice& choice : supported()) names.append(choice.name).append(" ");
  return names.c_str();
}

int headrace_use(const char* name) {
  for (const Choice& choice : supported())
    if (strcmp(choice.name, name) == 0) {
      chosen = &choice;
      return 0;
    }
  return -1;
}

Team* headrace_team_new(int64_t num_threads, const int64_t* cpus) {
  std::vector<int> where;
  if (cpus != nullptr) where.assign(cpus, cpus + num_threads);
  return new Team((int)num_threads, where);
}

void headrace_team_free(Team* team) { delete team; }

void headrace_pin_caller(int64_t cpu) { Team::pin(pthread_self(), (int)cpu); }

int64_t headrace_packed_bytes(const Matrix* m) {
  return padded(m->rows) / 32 * (padded(m->columns) / 32) * record_bytes(*m);
}

void headrace_pack_bf16(const Matrix* m, const uint16_t* weights, uint8_t* out) { pack_tensor(*m, weights, out); }

void headrace_pack_f32(const Matrix* m, const float* weights, uint8_t* out) { pack_tensor(*m, weights, out); }

// values [rows][columns]: what is stored, 0..255 or 0..15. scales, minima: fp16 [rows][columns / group]; minima may be null.
void headrace_pack_quantized(const Matrix* m, const uint8_t* values, const uint16_t* scales, const uint16_t* minima,
                             uint8_t* out) {
  const long steps = padded(m->columns) / 32, bytes = record_bytes(*m), groups = 32 / m->group;
  const long tile_bytes = m->format == INT8 ? 512 : 256, value_bytes = 2 * tile_bytes;
  memset(out, 0, padded(m->rows) / 32 * steps * bytes);
  for (long row = 0; row < m->rows; row++) {
    const long output = row % 16, tile = row % 32 / 16, row_groups = (m->columns + m->group - 1) / m->group;
    for (long step = 0; step < steps; step++) {
      uint8_t* record = out + (row / 32 * steps + step) * bytes;
      for (long k = 0; k < std::min(32L, (long)m->columns - 32 * step); k++) {
        uint8_t value = values[row * m->columns + 32 * step + k];
        long vector = k / 2 * 2 + output / 8, lane = output % 8 * 2 + k % 2;
        uint8_t* at = record + tile * tile_bytes;
        if (m->format == INT8)
          at[64 * (vector / 4) + 4 * lane + vector % 4] = value;
        else
          at[64 * (vector / 8) + 4 * lane + vector % 8 / 2] |= (uint8_t)(value << 4 * (vector % 2));
      }
      for (long g = 0; g < groups; g++) {
        long index = step * groups + g;
        if (index >= row_groups) break;
        uint8_t* at = record + value_bytes + 64 * g * (1 + m->has_minima) + 2 * (row % 32);
        memcpy(at, scales + row * row_groups + index, 2);
        if (m->has_minima) memcpy(at + 64, minima + row * row_groups + index, 2);
      }
    }
  }
}

void headrace_unpack_row(const Matrix* m, int64_t row, float* out) { kernels().unpack(m, row, out); }

Runtime* headrace_runtime_new(const Model* model, const Cache* cache, Team* team) {
  Runtime* run = new Runtime;
  const long tokens = model->max_tokens, item = model->is_f32 ? 4 : 2;
  run->model = model, run->cache = *cache, run->team = team;
  run->ld_x = padded(model->hidden);
  run->ld_qkv = padded((model->heads + 2 * model->kv_heads) * model->head_dim);
  run->ld_o = padded(model->heads * model->head_dim);
  run->ld_h = padded(model->intermediate);
  run->scratch_bytes = scratch_for(most_steps(*model), model->head_dim);
  run->x = (float*)aligned(tokens * run->ld_x * 4);
  run->sum = (float*)aligned(tokens * run->ld_x * 4);
  run->a = aligned(tokens * run->ld_x * item);
  run->qkv = (float*)aligned(tokens * run->ld_qkv * 4);
  run->q = aligned(tokens * run->ld_o * item);
  run->o = aligned(tokens * run->ld_o * item);
  run->h = aligned(tokens * run->ld_h * item);
  run->turns = (float*)aligned(tokens * 2 * model->head_dim * 4);
  run->scratch = aligned(team->size() * run->scratch_bytes);
  run->positions = (int64_t*)aligned(tokens * 8);
  run->span_of = (int64_t*)aligned(tokens * 8);
  for (void* buffer : {(void*)run->x, (void*)run->sum, run->a, (void*)run->qkv, run->q, run->o, run->h,
                       (void*)run->turns, (void*)run->scratch, (void*)run->positions, (void*)run->span_of})
    if (buffer == nullptr) {
      free_buffers(*run);
      delete run;
      return nullptr;
    }
  return run;
}

void headrace_runtime_free(Runtime* run) {
  free_buffers(*run);
  delete run;
}

void headrace_forward(Runtime* run, const Step* step) {
  for (long s = 0; s < step->num_spans; s++) {
    const Span& span = step->spans[s];
    for (long i = 0; i < span.num_tokens; i++) {
      run->positions[span.first_row + i] = span.start + i;
      run->span_of[span.first_row + i] = s;
    }
  }
  divide(*run, *step, run->model->heads, run->model->kv_heads);
  run->step = step;
  run->team->run(kernels().forward[run->model->is_f32], run);
}

// Logits [num_rows][vocabulary] of rows of the last step.
void headrace_logits(Runtime* run, const int64_t* rows, int64_t num_rows, float* out) {
  run->rows = rows, run->num_rows = num_rows, run->logits = out;
  run->team->run(kernels().logits[run->model->is_f32], run);
}

// The residual stream of the last step, fp32 [tokens][*ld].
const float* headrace_hidden(const Runtime* run, int64_t* ld) {
  *ld = run->ld_x;
  return run->x;
}

// out [num_rows][rows of m] = a [num_rows][columns padded to 32] times m. is_f32: of a.
int headrace_product(const Matrix* m, const void* a, int64_t num_rows, int64_t is_f32, float* out, Team* team) {
  long bytes = scratch_for(padded(m->columns) / 32, 32);
  Product product = {m, a, num_rows, out, team, aligned(team->size() * bytes), bytes};
  if (product.scratch == nullptr) return -1;
  team->run(kernels().product[is_f32], &product);
  free(product.scratch);
  return 0;
}

// o [tokens][heads][head_dim], as q: attention of a step whose keys and values are in the cache.
int headrace_attention(const Cache* cache, const Step* step, const AttentionHeads* heads, const void* q, int64_t is_f32,
                       void* o, Team* team) {
  Runtime run;
  run.cache = *cache, run.team = team, run.step = step, run.heads = *heads;
  run.q = const_cast<void*>(q), run.o = o;
  run.scratch_bytes = scratch_for(1, heads->head_dim);
  run.scratch = aligned(team->size() * run.scratch_bytes);
  if (run.scratch == nullptr) return -1;
  divide(run, *step, heads->heads, heads->kv_heads);
  team->run(kernels().attention[is_f32], &run);
  free(run.scratch);
  return 0;
}

struct Reading {
  const uint64_t* data;
  int64_t count;
  Team* team;
  std::atomic<uint64_t> sum;
};

// Reads `bytes` of memory once, for measuring the bandwidth; the sum keeps the compiler from leaving it out.
uint64_t headrace_read(const void* data, int64_t bytes, Team* team) {
  Reading reading = {(const uint64_t*)data, bytes / 8, team, {0}};
  team->run(
      [](void* context, int thread) {
        Reading& r = *(Reading*)context;
        int64_t first = r.count * thread / r.team->size() / 64 * 64, last = r.count * (thread + 1) / r.team->size() / 64 * 64;
        typedef uint64_t v8 __attribute__((vector_size(64), aligned(8), may_alias));
        uint64_t lanes[8] = {};
        v8 s0 = {}, s1 = {}, s2 = {}, s3 = {};
        for (int64_t i = first; i < last; i += 32) {
          s0 += *(const v8*)(r.data + i), s1 += *(const v8*)(r.data + i + 8);
          s2 += *(const v8*)(r.data + i + 16), s3 += *(const v8*)(r.data + i + 24);
        }
        s0 += s1 + s2 + s3;
        memcpy(lanes, &s0, 64);
        for (uint64_t lane : lanes) r.sum += lane;
      },
      &reading);
  return reading.sum;
}

}  // extern "C"
