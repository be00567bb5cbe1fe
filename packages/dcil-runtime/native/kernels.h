// What the kernels of every instruction set offer, as plain structs and function pointers.
//
// THE LAYOUT. A vector has L lanes (4, 8 or 16 floats). A group of N images lives in the lanes as N x LY x LX = L:
// every image is cut into a grid of LY x LX equal sub-tiles, and lane (n, ly, lx) holds sub-tile (ly, lx) of image n.
// With N = L the lanes are L images; with N = 1 they are the sub-tiles of a single one. One image, L = 8, 4 x 2:
//
//        image, H x W                 one channel plane: Hs x Ws vectors plus a halo
//      +-------+-------+
//      | lane0 | lane1 |              . . . . . .      Each vector holds the same pixel (y, x) of all 8 sub-tiles.
//      +-------+-------+              . v v v v .      The halo (.) repeats what the neighbouring sub-tiles hold
//      | lane2 | lane3 |              . v v v v .      there, and zeros beyond the image, so that
//      +-------+-------+    ---->     . v v v v .
//      | lane4 | lane5 |              . . . . . .        tap (ky, kx) of a filter, for 8 outputs at once,
//      +-------+-------+                                 is one aligned load at a fixed distance.
//      | lane6 | lane7 |
//      +-------+-------+              Planes follow each other: [channel][row][column][lane].
//
// A kept weight is therefore a Tap: a distance in bytes and a value. Kernel size, padding, dilation and groups are all
// in the distances; the kernel that streams taps knows none of them.
#pragma once
#include <cstdint>

namespace dcil {

/// y = f(x): none; clamp to [a, b] (ReLU, ReLU6); x > 0 ? x : a x; x sigmoid(x); x clamp(x + 3, 0, 6) / 6; sigmoid(x);
/// clamp(x + 3, 0, 6) / 6; tanh(x); x (1 + erf(x / sqrt 2)) / 2; the same with tanh in place of erf;
/// x > 0 ? x : a (exp(x) - 1); sqrt(x).
enum class Act : int32_t { None, Clamp, Leaky, Silu, Hardswish, Sigmoid, Hardsigmoid, Tanh, Gelu, GeluTanh, Elu, Sqrt };
constexpr int kActs = 12;
struct Activation {
  Act kind = Act::None;
  float a = 0, b = 0;
};

/// A plane of vectors inside a buffer: `data` is pixel (0, 0) of channel 0; strides count floats.
struct Planes {
  float* data = nullptr;
  long plane = 0, row = 0;
};

struct Tap {
  int32_t distance;  // bytes
  float weight;
};
struct QuadTap {
  int32_t distance;
  float weight[4];  // of four output channels
};

/// The taps of some output channels, one after the other: channel[i] owns taps[start[i]] to taps[start[i + 1]].
struct Rows {
  const int32_t* channel;
  const int32_t* start;
  const Tap* taps;
  int begin, end;  // the i to compute
};
/// The same for groups of four channels (-1: no channel) that share their taps.
struct Quads {
  const int32_t* channel;
  const int32_t* start;
  const QuadTap* taps;
  int begin, end;
};

/// What happens to a finished sum: + bias, + residual, activation, 0 outside the image, store; and the twin, a second
/// output act(scale * y + shift) for networks that normalise before they convolve.
struct Finish {
  Planes out, residual, twin;
  const float *bias, *twin_scale, *twin_shift;
  const int32_t* mask;  // per vector: all ones inside the image; null when the sub-tiles fit exactly
  long mask_row;
  Activation act, twin_act;
  bool simple;  // no mask, no twin, and the activation only keeps values from falling below `low`
  float low;
};

struct ConvArgs {
  const float* in;              // input pixel under tap 0 of output pixel (0, 0)
  long row_step, column_step;   // floats in the input per output row and column
  int y0, y1, x0, x1;           // output vectors to compute
  const Rows* blocks;           // one per block of input channels
  int block_count;
  Quads quads;
  float* scratch;               // partial sums between blocks: one tile per output channel
  Finish finish;
};

/// Rows of vectors from anywhere: a float is from[its index], or fill where that is negative or not below `limit`.
struct GatherArgs {
  float* to;
  long row;  // from one row of `to` to the next
  int rows, width;
  const float* from;
  const int32_t* index;
  int32_t limit;
  float fill;
};

/// One channel of images: lane l gets `height` rows of `width` pixels from `start[l]` on.
struct InterleaveArgs {
  float* to;
  long row;
  const float* from;
  const int32_t* start;
  long from_row;
  int height, width;
};

struct PoolArgs {
  Planes in, out;
  long row_step, column_step;
  int c0, c1, y0, y1, width;
  const int32_t* distances;  // bytes
  int taps;
  const float* scale;   // average: 1 / count per vector, 0 outside the image; null: maximum
  const int32_t* mask;
};

struct MapArgs {  // out = act(scale * a + shift + b), per channel
  Planes a, b, out;
  const float *scale, *shift;  // null: 1 and 0
  int c0, c1, y0, y1, width;
  Activation act;
  const int32_t* mask;
};

enum class Join : int32_t { Add, Sub, Mul, Div };

struct JoinArgs {  // out = act(a (+, -, *, /) b), where b has a's shape, one plane for all channels, or one number for each
  Planes a, b, out;
  const float* each;  // one number for image n and channel c: each[n * each_image + c * each_channel]; null: planes
  long each_image, each_channel;
  int images, c0, c1, y0, y1, width;
  Join kind;
  Activation act;
  const int32_t* mask;
};

/// y = act((x - mean) / sqrt(variance + eps) * scale + shift), scale and shift per channel (null: 1 and 0).
struct NormArgs {
  Planes in, out;
  const float *scale, *shift;
  float eps;
  int c0, c1, channels;  // statistics over the channels c0 to c1 (of a flat tensor's `channels`)
  int y0, y1, width, images;
  long pixels;           // of one image
  Activation act;
  const int32_t* mask;
};

struct MeanArgs {  // out[image][channel] = scale * the sum over the plane
  Planes in;
  int c0, c1, height, width, images, channels;
  float scale;
  float* out;
};

struct LinearArgs {  // out[n][o] = act(bias[o] + sum_i w[o][i] in[n][i]) for o0 <= o < o1
  const float *in, *dense, *bias, *residual;  // dense: null when `rows` holds the kept weights
  float* out;
  const int32_t *start, *column;
  const float* weight;
  int images, inputs, outputs, o0, o1;
  Activation act;
};

/// Attention of one head. Keys and values come in panels of kPanel rows: [panel][place in the sum][row].
struct AttendArgs {
  const float *query, *key, *value;  // query: [depth][queries], key: panels of keys, value: panels of width
  const float *added, *each;         // to every score, [key][query], and to all of a key; null: nothing
  float *scores, *out;               // out: [width][queries]
  long query_step, out_step;
  int queries, keys, depth, width;
  float scale;
};
constexpr int kPanel = 6;
constexpr int kMostQueries = 4;  // vectors of them at once; sizes the scores

/// One halo vector: plane[to] = permute(plane[from]) with permutation `order`. Distances in floats from pixel (0, 0).
struct Move {
  int32_t to, from, order;
};

struct HaloArgs {
  Planes planes;
  const int32_t* channels;  // which ones; null: `first`, `first` + 1, ...
  int first, count;
  const Move *moves, *end;
  const int32_t* orders;
};

struct Tile {
  int rows, columns;
  void (*conv)(const ConvArgs&);            // tiles outside, output channels inside
  void (*conv_by_channel)(const ConvArgs&);  // the other way round; one block only
  void (*conv_quads)(const ConvArgs&);      // null where four channels of a tile do not fit the registers
};

struct QuantKernels;

struct KernelSet {
  const char* name;
  int lanes;
  const Tile* tiles;         // for column_step = one vector
  const Tile* tiles_stride2;  // for two
  const Tile* tile_any;      // 1 x 1, any column_step
  int tile_count;
  void (*exchange)(const HaloArgs&);
  void (*gather)(const GatherArgs&);
  void (*interleave)(const InterleaveArgs&);
  void (*pool)(const PoolArgs&);
  void (*map)(const MapArgs&);
  void (*join)(const JoinArgs&);
  void (*norm_pixels)(const NormArgs&);  // statistics of every pixel for itself
  void (*norm_planes)(const NormArgs&);  // of whole planes
  void (*norm_flat)(const NormArgs&);    // of a flat tensor
  void (*mean)(const MeanArgs&);
  void (*linear)(const LinearArgs&);
  void (*attend)(const AttendArgs&);
  const QuantKernels* quant = nullptr;  // for u8, of as many bytes
};

constexpr int kMaxTile = 28;  // vectors; sizes the scratch

const KernelSet& kernels_portable();
const KernelSet& kernels_wide();  // the 16 lanes of AVX-512 in plain code: tests that layout on any machine
#ifdef DCIL_X86
const KernelSet& kernels_avx2();
const KernelSet& kernels_avx512();
#endif
#ifdef DCIL_ARM
const KernelSet& kernels_neon();
#endif

/// The best set this CPU runs, or the named one; null when it is unknown or the CPU lacks it.
const KernelSet* find_kernels(const char* name);

}  // namespace dcil
