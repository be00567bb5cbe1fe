// What the kernels of every instruction set offer for tensors of u8 (quant.h): real = scale * (q - zero).
//
// THE LAYOUT is that of kernels.h, with four times as many lanes, because a vector holds four times as many bytes. What
// lies beyond the image holds the zero point. A dot-product instruction multiplies four neighbouring bytes by four
// weights, but neighbouring bytes are pixels here. So the vectors of any four kept inputs of an output channel are
// interleaved in registers, which makes of four vectors of 64 pixels four vectors of 16 pixels x 4 inputs:
//
//     a a a a ...                 a b c d | a b c d | ...      pixels 0 to 15
//     b b b b ...   ---->         a b c d | a b c d | ...      pixels 16 to 31
//     c c c c ...   8 unpacks     a b c d | a b c d | ...      pixels 32 to 47
//     d d d d ...                 a b c d | a b c d | ...      pixels 48 to 63
//
// Sums are 32 bits wide and exact, so every instruction set gives the same bits. In which order a vector's pixels lie in
// the four vectors of sums is each instruction set's own matter (`order`).
#pragma once
#include <cstdint>

#include "kernels.h"

namespace dcil {

/// Planes (kernels.h) of u8; strides count bytes.
struct BytePlanes {
  uint8_t* data = nullptr;
  long plane = 0, row = 0;
};

/// How a tensor's numbers are stored.
struct Store {
  float scale, inverse, zero;
  uint8_t low = 0, high = 255;  // the activation's ends, where it only clamps
};

/// What happens to a finished sum s of channel c: t = s * scale[c] + offset[c] + residual * residual_scale, in units of
/// the stored output; then the activation, rounding to even, and the zero point beyond the image. The twin stores
/// twin_act(twin_scale[c] * y + twin_shift[c]), y being the real number before rounding.
struct QuantFinish {
  BytePlanes out, residual, twin;
  const float *scale, *offset;
  float residual_scale;
  const float *twin_scale, *twin_shift;
  Store store, twin_store;
  Activation act, twin_act;  // act is none where the ends of `store` say all
  bool wild;            // may t be 2^31 or more?
  const uint8_t* mask;  // per vector: 255 inside the image; null when the sub-tiles fit exactly
  long mask_row;
};

/// A stream of 4 distances in bytes and `width` weights, each four int8: entry i owns groups start[i] to start[i + 1]
/// and computes the channels channel[i * width] and following (-1: none).
struct Groups {
  const int32_t *channel, *start, *stream;
  int begin, end;  // the i to compute
};

struct QuantConvArgs {
  const uint8_t* in;           // input pixel under tap 0 of output pixel (0, 0)
  long row_step, column_step;  // bytes in the input per output row and column
  int y0, y1, x0, x1;          // output vectors to compute
  Groups groups;
  const int32_t* first;  // what the sums of each channel begin with
  QuantFinish finish;
};

struct QuantMapArgs {  // a finished sum without the sum: t = a * scale[c] + offset[c] + residual * residual_scale
  BytePlanes a;
  QuantFinish finish;
  int c0, c1, y0, y1, width;
};

struct QuantHaloArgs {
  BytePlanes planes;
  const int32_t* channels;  // which ones; null: `first`, `first` + 1, ...
  int first, count;
  const Move *moves, *end;
  const uint8_t* orders;
  uint8_t fill;
};

struct QuantPoolArgs {
  BytePlanes in, out;
  long row_step, column_step;
  int c0, c1, y0, y1, width;
  const int32_t* distances;
  int taps;
  const uint8_t* mask;
  uint8_t zero;  // beyond the image
};

struct QuantMeanArgs {  // out[image][channel] = scale * (the sum of the plane's bytes - zeros)
  BytePlanes in;
  int c0, c1, height, width, images, channels;
  float scale;
  int64_t zeros;
  float* out;
};

/// Rows of vectors of u8 from floats anywhere: from[index], or the zero point where that is negative. The indices of
/// a vector lie in the order of sums.
struct QuantizeArgs {
  uint8_t* to;
  long row;
  int rows, width;
  const float* from;
  const int32_t* index;
  Store store;
};

/// The same from a layout of floats whose sub-tiles are twice as high and wide: each vector of u8 comes from four of them.
struct QuantizeTilesArgs {
  BytePlanes to;  // of one channel
  Planes from;
  int height, width;     // of a sub-tile of u8
  const uint8_t* order;  // of the bytes that the four vectors become
  Store store;
};

struct QuantLinearArgs {  // out[n][o] = scale[o] * sum_i w[o][i] * in[n][i] + offset[o]
  const uint8_t* in;
  const int8_t* dense;  // rows of `pitch` weights; null when the kept ones are given
  const int32_t *start, *column, *first;
  const int8_t* weight;
  const float *scale, *offset;
  float* out;
  int images, inputs, pitch, outputs, o0, o1;
};

struct QuantTile {
  int rows, columns, width;  // width: output channels at a time
  void (*conv)(const QuantConvArgs&);
};

struct QuantKernels {
  const QuantTile *tiles, *tiles_any;  // for column_step = one vector; for any
  int tile_count;
  void (*exchange)(const QuantHaloArgs&);
  void (*map)(const QuantMapArgs&);
  void (*pool)(const QuantPoolArgs&);  // maximum
  void (*quantize)(const QuantizeArgs&);
  void (*quantize_tiles)(const QuantizeTilesArgs&);
  void (*mean)(const QuantMeanArgs&);
  void (*linear)(const QuantLinearArgs&);
  int (*order)(int place);  // the byte of a vector that lies at `place` of its four vectors of sums
  int byte_offset;          // `conv` and `linear` multiply bytes less this; `first` makes up for it
};

const QuantKernels& quant_kernels_portable();
const QuantKernels& quant_kernels_wide();
#ifdef DCIL_X86
const QuantKernels& quant_kernels_avx2();
const QuantKernels& quant_kernels_avxvnni();
const QuantKernels& quant_kernels_avx512();
const QuantKernels& quant_kernels_avx512vnni();
#endif
#ifdef DCIL_ARM
const QuantKernels& quant_kernels_neon();
const QuantKernels& quant_kernels_neondot();
#endif

}  // namespace dcil
