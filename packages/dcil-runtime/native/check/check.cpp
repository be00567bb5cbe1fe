// Random networks through every kernel set, batch size and thread count, for the sanitizers to watch; results are held
// against a convolution written as its definition. (The Python tests compare with torch.)
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <thread>

#include "../engine.h"
#include "../ops/conv.h"
#include "check.h"

using namespace dcil;

namespace {

std::mt19937 rng(1);

int draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }

std::vector<float> noise(size_t n) {
  std::normal_distribution<float> normal;
  std::vector<float> v(n);
  for (float& x : v) x = normal(rng);
  return v;
}

Op convolution(const Shape& in, int outputs, Window w, int groups, double keep) {
  Op op;
  op.kind = Kind::Conv;
  op.in = {0};
  op.window = w;
  op.groups = groups;
  op.bias = noise(size_t(outputs));
  const size_t size = size_t(outputs) * (in.c / groups) * w.kh * w.kw;
  for (size_t i = 0; i < size; i++)
    if (std::uniform_real_distribution<>()(rng) < keep) op.index.push_back(uint32_t(i));
  op.weight = noise(op.index.size());
  return op;
}

/// The definition.
std::vector<float> reference(const Op& op, const Shape& in, const Shape& out, const float* x) {
  const Window& w = op.window;
  std::vector<float> y(size_t(out.size()));
  for (long i = 0; i < out.size(); i++) y[size_t(i)] = op.bias[size_t(i / (out.h * out.w))];
  const int per = in.c / op.groups;
  for (size_t k = 0; k < op.index.size(); k++) {
    const int i = int(op.index[k]), kx = i % w.kw, ky = i / w.kw % w.kh, c = i / (w.kw * w.kh) % per;
    const int o = i / (w.kw * w.kh * per), from = o / (out.c / op.groups) * per + c;
    for (int oy = 0; oy < out.h; oy++)
      for (int ox = 0; ox < out.w; ox++) {
        const int y0 = oy * w.sy - w.top + ky * w.dy, x0 = ox * w.sx - w.left + kx * w.dx;
        if (y0 < 0 || y0 >= in.h || x0 < 0 || x0 >= in.w) continue;
        y[(size_t(o) * out.h + oy) * out.w + ox] += op.weight[k] * x[(size_t(from) * in.h + y0) * in.w + x0];
      }
  }
  return y;
}

bool close(const std::vector<float>& a, const float* b) {
  float most = 1e-6f, apart = 0;
  for (size_t i = 0; i < a.size(); i++) {
    most = std::max(most, std::fabs(a[i]));
    apart = std::max(apart, std::fabs(a[i] - b[i]));
  }
  return apart <= 1e-5f * most;
}

bool check_convolution(const KernelSet& kernels) {
  const int groups = draw(1, 2), k = draw(1, 4), pad = draw(0, 3);
  const Shape in{groups * draw(1, 9), draw(k * 2, 20), draw(k * 2, 20)};
  const Window w{k, draw(1, k), draw(1, 3), draw(1, 3), pad, pad, pad, pad, draw(1, 2), draw(1, 2)};
  Graph graph(in);
  const double keep = draw(0, 3) / 3.0;
  graph.add(convolution(in, groups * draw(1, 9), w, groups, keep));
  const Shape out = graph.shapes()[1];
  const int count = draw(1, 19);
  const auto x = noise(size_t(count) * size_t(in.size()));
  std::vector<float> y(size_t(count) * size_t(out.size()));
  Engine engine(graph, kernels, draw(1, 2), 0.02);
  engine.run(x.data(), count, y.data());
  for (int n = 0; n < count; n++)
    if (!close(reference(engine.graph().ops()[0], in, out, x.data() + n * in.size()), y.data() + n * out.size()))
      return false;
  return true;
}

Op simple(Kind kind, std::vector<int> in) {
  Op op;
  op.kind = kind;
  op.in = std::move(in);
  return op;
}

/// Attention over the pixels of a tensor, with what is added to its scores.
int attend(Graph& g, int tensor, int heads, bool windows) {
  const Shape shape = g.shapes()[size_t(tensor)];
  Op op = simple(Kind::Attention, {tensor});
  const int pixels = shape.h * shape.w, depth = shape.c / heads;
  op.groups = heads;
  op.window.kh = op.window.kw = depth;
  for (int part = 0; part < 3; part++)
    for (int c = 0; c < heads * depth; c++) op.index.push_back(uint32_t(part == 1 ? shape.c - 1 - c : c));
  op.number = 0.5f;
  if (!windows) return g.add(op);
  op.shape = {pixels / shape.w, heads, shape.w};
  for (int p = 0; p < pixels; p++) op.tokens.push_back(uint32_t((p + 3) % pixels));
  op.table = noise(size_t(pixels) * shape.w * heads);
  return g.add(op);
}

/// The operators of tokens, from a tensor to its like.
int tokens(Graph& g, int tensor) {
  const Shape shape = g.shapes()[size_t(tensor)];
  const int a = attend(g, tensor, 2, true), b = attend(g, a, 1, false);
  Op taken = simple(Kind::Take, {b, tensor});
  taken.shape = {shape.c, 1, shape.h * shape.w};
  for (long i = 0; i < shape.size(); i++)
    taken.index.push_back(i % 7 ? uint32_t((i * 5 + 1) % (2 * shape.size())) : 0xffffffff);
  const int c = g.add(taken);
  Op constant = simple(Kind::Constant, {});
  constant.shape = taken.shape;
  constant.table = noise(size_t(shape.size()));
  Op back = simple(Kind::Take, {g.add(simple(Kind::Mul, {c, g.add(constant)}))});
  back.shape = shape;
  for (long i = 0; i < shape.size(); i++) back.index.push_back(uint32_t(shape.size() - 1 - i));
  int d = g.add(back);
  for (Kind kind : {Kind::Rows, Kind::Columns}) {
    Op op = simple(kind, {d});
    op.shape = shape;
    const uint32_t side = uint32_t(kind == Kind::Rows ? shape.h : shape.w);
    for (uint32_t i = 0; i < side * side; i += 2) op.index.push_back(i);
    op.weight = noise(op.index.size());
    d = g.add(op);
  }
  return d;
}

/// A network with every operator; callers share the engine.
Graph everything() {
  const Shape in{3, 19, 23};
  Graph g(in);
  Op stem = convolution(in, 8, {3, 3, 2, 2, 1, 1, 1, 1, 1, 1}, 1, 0.5);
  stem.act = {Act::Clamp, 0, 6};
  stem.twin = 0;
  stem.twin_scale = noise(8);
  stem.twin_shift = noise(8);
  const int a = g.add(stem), twin = a + 1;
  Op next = convolution(g.shapes()[a], 8, {3, 3, 1, 1, 1, 1, 1, 1, 1, 1}, 1, 0.2);
  next.in = {twin};
  next.residual = a;
  next.act = {Act::Silu, 0, 0};
  const int b = g.add(next);
  Op maximum = simple(Kind::MaxPool, {b});
  maximum.window = {3, 3, 2, 2, 1, 1, 1, 1, 1, 1};
  Op average = simple(Kind::AvgPool, {b});
  average.window = {3, 3, 2, 2, 1, 1, 1, 1, 1, 1};
  const int p = g.add(maximum), q = g.add(average);
  const int c = g.add(simple(Kind::Concat, {p, q})), sum = g.add(simple(Kind::Map, {c, c}));
  const int mean = g.add(simple(Kind::Mean, {tokens(g, sum)}));
  Op linear = simple(Kind::Linear, {mean});
  linear.bias = noise(5);
  for (uint32_t i = 0; i < 80; i += 3) linear.index.push_back(i);
  linear.weight = noise(linear.index.size());
  g.add(linear);
  return g;
}

bool check_callers(const KernelSet& kernels) {
  const Graph graph = everything();
  const auto x = noise(9 * size_t(graph.shapes()[0].size()));
  Engine alone(graph, kernels, 1, 0.0);
  std::vector<float> want(9 * 5);
  alone.run(x.data(), 9, want.data());
  Engine shared(graph, kernels, 2, 0.05);
  std::vector<std::vector<float>> got(3, std::vector<float>(9 * 5));
  std::vector<std::thread> callers;
  for (auto& y : got)
    callers.emplace_back([&] {
      for (int count : {9, 1, 4, 9}) shared.run(x.data(), count, y.data());
    });
  for (auto& t : callers) t.join();
  for (const auto& y : got)
    if (!close(want, y.data())) return false;
  return shared.memory() > 0 && !shared.describe(1).empty();
}

/// Four channels at a time, dealt to two threads so that neither has a multiple of four, computed by one alone.
bool check_dealt_quads(const KernelSet& kernels) {
  const Shape in{3, 16, 16};
  Graph graph(in);
  graph.add(convolution(in, 6, {3, 3, 1, 1, 1, 1, 1, 1, 1, 1}, 1, 1.0));
  Op next = convolution(graph.shapes()[1], 1, {3, 3, 1, 1, 1, 1, 1, 1, 1, 1}, 1, 1.0);
  next.in = {1};
  graph.add(next);
  Program program(graph, kernels, 1, 2);
  program.build();
  Team alone(1);
  tune(program, alone, 0);
  const auto x = noise(size_t(in.size()));
  const auto result = [&] {
    Arena arena(program);
    Aligned<float> scratch(size_t(program.scratch_floats()));
    const Member m{program, arena, scratch.data(), 0, 1};
    std::vector<float> y(size_t(graph.shapes()[2].size()));
    const void* const in[] = {x.data()};
    load_inputs(m, in, 0, 1);
    run_steps(m, alone);
    void* const out[] = {y.data()};
    store_outputs(m, out, 0, 1);
    return y;
  };
  const auto want = result();
  Conv& first = static_cast<Conv&>(*program.steps[0]);
  first.chosen.method = Method::Quads;
  first.chosen.split = Split::Channels;
  first.packed = pack(*first.op, *program.values[first.in[0]].layout, first.chosen, 2);
  return close(want, result().data());
}

/// Forks while a caller is at work; returns whether the child computes the same and frees its copy.
[[maybe_unused]] bool check_forks(const KernelSet& kernels) {
  const Graph graph = everything();
  const auto x = noise(9 * size_t(graph.shapes()[0].size()));
  auto shared = std::make_unique<Engine>(graph, kernels, 2, 0.02);
  std::vector<float> want(9 * 5);
  shared->run(x.data(), 9, want.data());
  std::atomic<bool> done{false};
  std::thread caller([&] {
    for (std::vector<float> y(9 * 5); !done;) shared->run(x.data(), 9, y.data());
  });
  bool good = true;
  for (int i = 0; i < 5; i++) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      std::vector<float> y(9 * 5);
      shared->run(x.data(), 9, y.data());
      shared.reset();
      _exit(y == want ? 0 : 1);
    }
    int status = 1;
    waitpid(child, &status, 0);
    good &= status == 0;
  }
  done = true;
  caller.join();
  return good;
}

}  // namespace

int check_networks() {
  int failed = 0;
  for (const char* name : {"portable", "wide", "avx2", "avx512", "neon"}) {
    const KernelSet* kernels = find_kernels(name);
    if (!kernels) continue;
    for (int i = 0; i < 40; i++) failed += !check_convolution(*kernels);
    failed += !check_callers(*kernels);
    failed += !check_dealt_quads(*kernels);
#if !defined(__SANITIZE_THREAD__) && !defined(EMULATED)  // neither supports a fork of several threads
    failed += !check_forks(*kernels);
#endif
  }
  std::printf("networks: %d failures\n", failed);
  return failed != 0;
}
