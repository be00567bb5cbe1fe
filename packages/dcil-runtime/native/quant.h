// Tensors stored as u8, real = scale * (q - zero), and int8 weights with a scale for each output channel.
#pragma once

namespace dcil {

struct Op;

struct Quant {
  float scale = 0;  // 0: not quantized
  int zero = 0;     // 0 to 255
  explicit operator bool() const { return scale > 0; }
  bool operator==(const Quant& o) const { return scale == o.scale && zero == o.zero; }
};

inline bool is_scale(float scale) { return scale >= 1e-20f && scale <= 1e20f; }

/// Throws Error unless the operator's weights are int8, with a scale for each output channel, and its input is u8; a
/// convolution's other tensors too.
void check_quantized_weights(const Op& op, const Quant& in, const Quant& residual);

}  // namespace dcil
