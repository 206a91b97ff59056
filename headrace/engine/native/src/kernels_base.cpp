// For processors without any of the other instruction sets, and of other architectures.
#include <math.h>

#include "runtime.h"

#define ISA BASE

namespace headrace_base {
#include "kernels.inc"
#include "forward.inc"
}  // namespace headrace_base
