#include "operator.h"

namespace dcil {

extern const Operator kConv, kMaxPool, kAvgPool, kMap, kConcat, kMean, kFlatten, kLinear;
extern const Operator kAdd, kSub, kMul, kDiv, kLayerNorm, kGroupNorm, kSelect;
extern const Operator kTake, kConstant, kEmbedding, kRows, kColumns, kAttention;

const Operator& operator_of(Kind kind) {
  static const Operator* const all[kKinds] = {&kConv,   &kMaxPool, &kAvgPool, &kMap, &kConcat,    &kMean,      &kFlatten,
                                               &kLinear, &kAdd, &kSub, &kMul,     &kDiv, &kLayerNorm, &kGroupNorm, &kSelect,
                                               &kTake, &kConstant, &kEmbedding, &kRows, &kColumns, &kAttention};
  return *all[int(kind)];
}

}  // namespace dcil
