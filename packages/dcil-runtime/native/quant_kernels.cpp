// All kernels of one instruction set for u8: compiled once per set, without contraction, so that all give the same bits.
#include "quant_kernels.h"

#include "quant_conv_kernel.h"

namespace ISA {

using namespace dcil;

template <int R, int C, int Width, int Step>
constexpr QuantTile quant_tile() {
  return {R, C, Width, quant_conv<R, C, Width, Step>};
}

template <int Step>
struct QuantTiles {
  static constexpr QuantTile all[] = {
      quant_tile<1, 1, 1, Step>(), quant_tile<1, 2, 1, Step>(), quant_tile<2, 1, 1, Step>(), quant_tile<1, 1, 2, Step>(),
#if defined(MANY_REGISTERS)
      quant_tile<1, 4, 1, Step>(), quant_tile<2, 2, 1, Step>(), quant_tile<1, 2, 2, Step>(), quant_tile<2, 1, 2, Step>(),
      quant_tile<1, 1, 4, Step>(),
#endif
  };
};

static void quant_exchange(const QuantHaloArgs& h) {
  const U fill = splat_byte(h.fill);
  for (const Move* m = h.moves; m < h.end; m++) {
    const uint8_t* order = m->order < 0 ? nullptr : h.orders + long(m->order) * BYTES;
    const U from = order ? load(order) : splat_byte(255);
    for (int i = 0; i < h.count; i++) {
      uint8_t* plane = h.planes.data + (h.channels ? h.channels[i] : h.first + i) * h.planes.plane;
      store(plane + m->to, permute(load(plane + m->from), from, fill));
    }
  }
}

static void quant_map(const QuantMapArgs& a) {
  for (int c = a.c0; c < a.c1; c++)
    for (int y = a.y0; y < a.y1; y++)
      for (int x = 0; x < a.width; x++) finish(a.finish, c, y, x, widened(load(spot(a.a, c, y, x))));
}

static void quant_pool(const QuantPoolArgs& a) {
  for (int c = a.c0; c < a.c1; c++)
    for (int y = a.y0; y < a.y1; y++)
      for (int x = 0; x < a.width; x++) {
        const uint8_t* p = a.in.data + c * a.in.plane + y * a.row_step + x * a.column_step;
        U v = load(p + a.distances[0]);
        for (int i = 1; i < a.taps; i++) v = larger(v, load(p + a.distances[i]));
        const uint8_t* mask = a.mask ? a.mask + (long(y) * a.width + x) * BYTES : nullptr;
        store(spot(a.out, c, y, x), outside(v, mask, a.zero));
      }
}

static void quantize(const QuantizeArgs& a) {
  const int32_t* index = a.index;
  for (int y = 0; y < a.rows; y++)
    for (int x = 0; x < a.width; x++, index += BYTES) {
      Floats f;
      for (int r = 0; r < 4; r++) {
        f.part[r] = load_each(a.from, index + r * LANES, INT32_MAX, V{});
        f.part[r] = f.part[r] * a.store.inverse + a.store.zero;
      }
      store(a.to + y * a.row + x * BYTES, narrowed(f));
    }
}

static void quantize_tiles(const QuantizeTilesArgs& a) {
  const U order = load(a.order);
  for (int y = 0; y < a.height; y++)
    for (int x = 0; x < a.width; x++) {
      Floats f;
      for (int r = 0; r < 4; r++) {
        const float* p = a.from.data + (y + r / 2 * a.height) * a.from.row + (x + r % 2 * a.width) * LANES;
        f.part[r] = load(p) * a.store.inverse + a.store.zero;
      }
      store(a.to.data + y * a.to.row + x * BYTES, permute(narrowed(f), order, U{}));
    }
}

static void quant_mean(const QuantMeanArgs& a) {
  const int lanes = BYTES / a.images;  // of one image
  for (int c = a.c0; c < a.c1; c++) {
    Sums sums = {};
    for (int y = 0; y < a.height; y++)
      for (int x = 0; x < a.width; x++) {
        const Sums more = integers(load(spot(a.in, c, y, x)));
        for (int r = 0; r < 4; r++) sums.part[r] += more.part[r];
      }
    int64_t total[LANES] = {};  // a group has at most as many images
    const VI all = sums.part[0] + sums.part[1] + sums.part[2] + sums.part[3];
    if (a.images == 1)
      for (int l = 0; l < LANES; l++) total[0] += all[l];
    else
      for (int place = 0; place < BYTES; place++) total[order(place) / lanes] += sums.part[place / LANES][place % LANES];
    for (int n = 0; n < a.images; n++) a.out[long(n) * a.channels + c] = float(total[n] - a.zeros) * a.scale;
  }
}

INLINE int32_t kept_dot(const QuantLinearArgs& a, int o, const uint8_t* in) {
  uint32_t s = 0;
  for (int i = a.start[o]; i < a.start[o + 1]; i++) s += uint32_t((in[a.column[i]] - kByteOffset) * a.weight[i]);
  return int32_t(s);
}

static void quant_linear(const QuantLinearArgs& a) {
  for (int o = a.o0; o < a.o1; o++)
    for (int n = 0; n < a.images; n++) {
      const uint8_t* in = a.in + long(n) * a.pitch;
      const int32_t dot = a.dense ? dot_bytes(in, a.dense + long(o) * a.pitch, a.pitch) : kept_dot(a, o, in);
      const float s = float(int32_t(uint32_t(dot) + uint32_t(a.first[o])));
      a.out[long(n) * a.outputs + o] = s * a.scale[o] + a.offset[o];
    }
}

}  // namespace ISA

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

namespace dcil {

const QuantKernels& JOIN(quant_kernels_, ISA)() {
  static const QuantKernels set = {ISA::QuantTiles<1>::all,
                                   ISA::QuantTiles<0>::all,
                                   int(sizeof(ISA::QuantTiles<1>::all) / sizeof(QuantTile)),
                                   ISA::quant_exchange,
                                   ISA::quant_map,
                                   ISA::quant_pool,
                                   ISA::quantize,
                                   ISA::quantize_tiles,
                                   ISA::quant_mean,
                                   ISA::quant_linear,
                                   ISA::order,
                                   ISA::kByteOffset};
  return set;
}

}  // namespace dcil
