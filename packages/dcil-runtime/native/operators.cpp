#include "operator.h"

namespace dcil {

extern const Operator kConv, kMaxPool, kAvgPool, kMap, kConcat, kMean, kFlatten, kLinear;

const Operator& operator_of(Kind kind) {
  static const Operator* const all[kKinds] = {&kConv, &kMaxPool, &kAvgPool, &kMap, &kConcat, &kMean, &kFlatten, &kLinear};
  return *all[int(kind)];
}

}  // namespace dcil
