#include "quant.h"

#include <cmath>

#include "graph.h"

namespace dcil {

void check_quantized_weights(const Op& op, const Quant& in, const Quant& residual) {
  // 255 * 127 for each kept weight must stay below 2^31.
  constexpr int64_t most = 65536;
  require(op.kind == Kind::Conv || op.kind == Kind::Linear, "only a convolution or linear layer has int8 weights");
  require(bool(in), "int8 weights need a quantized input");
  const bool convolution = op.kind == Kind::Conv;
  require(!convolution || (op.quant && (op.twin < 0 || op.twin_quant)), "an int8 convolution's output is not quantized");
  require(!convolution || op.residual < 0 || residual, "an int8 convolution's residual is not quantized");
  require(op.weight_scale.size() == op.bias.size(), "a weight scale has another length than the output's channels");
  for (float scale : op.weight_scale)
    require(scale == 0 || is_scale(scale), "a weight scale is neither 0 nor between 1e-20 and 1e20");
  for (float w : op.weight)
    require(std::fabs(w) <= 127 && w == std::trunc(w), "an int8 weight is not between -127 and 127");
  for (size_t o = 0; o < op.bias.size(); o++)
    require(op.start[o + 1] - op.start[o] <= most, "an output channel keeps more than 65536 int8 weights");
}

}  // namespace dcil
