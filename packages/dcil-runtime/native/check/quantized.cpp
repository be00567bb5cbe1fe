// Random int8 convolutions and a network around them: every instruction set, arrangement and number of threads must give
// the bits of plain code on one thread; callers share an engine.
#include <cstdio>
#include <random>
#include <thread>

#include "../engine.h"
#include "../quant_kernels.h"
#include "check.h"

using namespace dcil;

namespace {

std::mt19937 rng(3);

int draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }

std::vector<float> noise(size_t n) {
  std::normal_distribution<float> normal;
  std::vector<float> v(n);
  for (float& x : v) x = normal(rng);
  return v;
}

Op quantized_input() {
  Op op;
  op.kind = Kind::Map;
  op.in = {0};
  op.quant = {0.03f, draw(0, 255)};
  return op;
}

Op dequantized(int tensor) {
  Op op;
  op.kind = Kind::Map;
  op.in = {tensor};
  return op;
}

/// Weights of int8, of which `keep` stay.
void add_weights(Op& op, int outputs, size_t per_output, double keep) {
  op.bias = noise(size_t(outputs));
  op.weight_scale.assign(size_t(outputs), 0.004f);
  for (size_t i = 0; i < size_t(outputs) * per_output; i++)
    if (std::uniform_real_distribution<>()(rng) < keep) op.index.push_back(uint32_t(i)), op.weight.push_back(float(draw(-127, 127)));
}

Op convolution(const Graph& g, int in, int outputs, Window w, int groups, double keep) {
  Op op;
  op.kind = Kind::Conv;
  op.in = {in};
  op.window = w;
  op.groups = groups;
  op.quant = {0.06f, draw(0, 255)};
  add_weights(op, outputs, size_t(g.shapes()[size_t(in)].c / groups * w.kh * w.kw), keep);
  return op;
}

Graph one_layer() {
  const int groups = draw(1, 2), k = draw(1, 4), pad = draw(0, 3);
  Graph g({groups * draw(1, 9), draw(k * 2, 30), draw(k * 2, 30)});
  const int in = g.add(quantized_input());
  const Window w{k, k, draw(1, 3), draw(1, 3), pad, pad, pad, pad, draw(1, 2), draw(1, 2)};
  g.add(dequantized(g.add(convolution(g, in, groups * draw(1, 9), w, groups, draw(0, 3) / 3.0))));
  return g;
}

/// A residual that the output may overwrite, a twin, a pool, a sum of two scales, a mean and a classifier.
Graph several_layers() {
  Graph g({3, 19, 23});
  const Window same{3, 3, 1, 1, 1, 1, 1, 1, 1, 1};
  const int a = g.add(convolution(g, g.add(quantized_input()), 8, same, 1, 0.5));
  Op next = convolution(g, a, 8, same, 1, 0.2);
  next.residual = a;
  next.act = {Act::Clamp, 0, 6};
  next.twin = 0;
  next.twin_scale = noise(8);
  next.twin_shift = noise(8);
  next.twin_quant = {0.05f, 90};
  const int b = g.add(next), twin = b + 1;
  Op pool = dequantized(twin);
  pool.kind = Kind::MaxPool;
  pool.window = {3, 3, 1, 1, 1, 1, 1, 1, 1, 1};
  pool.quant = {0.05f, 90};
  Op sum = dequantized(b);
  sum.in.push_back(g.add(pool));
  sum.quant = {0.1f, 30};
  Op mean = dequantized(g.add(sum));
  mean.kind = Kind::Mean;
  mean.quant = {0.02f, 100};
  Op linear = dequantized(g.add(mean));
  linear.kind = Kind::Linear;
  add_weights(linear, 5, 8, 0.6);
  g.add(linear);
  return g;
}

bool same_bits(const Graph& graph, const KernelSet& kernels, int callers) {
  const int count = draw(1, 19);
  const auto x = noise(size_t(count) * size_t(graph.shapes()[0].size()));
  const size_t size = size_t(count) * size_t(graph.shapes()[size_t(graph.outputs()[0])].size());
  std::vector<float> want(size);
  Engine(graph, *find_kernels("portable"), 1, 0).run(x.data(), count, want.data());
  Engine engine(graph, kernels, draw(1, 2), 0.02);
  const std::vector<float> blank(size, -1e30f);
  std::vector<std::vector<float>> got(static_cast<size_t>(callers), blank);
  std::vector<std::thread> threads;
  for (auto& y : got) threads.emplace_back([&] { engine.run(x.data(), count, y.data()); });
  for (auto& t : threads) t.join();
  for (const auto& y : got)
    if (y != want) return false;
  return true;
}

}  // namespace

int check_quantized() {
  int failed = 0;
  for (const char* name : {"portable", "wide", "avx2", "avx2-plain", "avx512", "avx512-plain", "neon", "neon-plain"}) {
    const KernelSet* kernels = find_kernels(name);
    if (!kernels) continue;
    for (int i = 0; i < 25; i++) failed += !same_bits(one_layer(), *kernels, 1);
    for (int i = 0; i < 3; i++) failed += !same_bits(several_layers(), *kernels, 3);
    std::printf("quantized: %s, of bytes less %d\n", name, kernels->quant->byte_offset);
  }
  std::printf("quantized: %d failures\n", failed);
  return failed != 0;
}
