#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>

#include "runtime.h"

#define ISA AMX
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,fma,f16c")

namespace headrace_amx {
#include "kernels.inc"
#include "forward.inc"
}  // namespace headrace_amx
#endif
