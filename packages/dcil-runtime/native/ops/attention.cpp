// Attention: out = softmax(number * queries . keys + added) values, for every head.
//
// The channels of queries, keys and values are those in `index`, counted through the inputs: for every head window.kh of
// queries, then all heads' keys, and window.kw of values for every head. Tokens are pixels; `tokens` cuts them into
// windows of `shape.w` that attend to themselves alone. `table` holds what is added, as [shape.c windows, or 1 for all]
// [shape.h heads, or 1 for all][key][query]. With count_pad the last input has a number to add for each key.
#include <algorithm>

#include "../cost.h"
#include "../planner.h"
#include "places.h"

namespace dcil {

namespace {

long rounded(long count, long step) { return (count + step - 1) / step * step; }

/// Floats of one head in a thread's scratch.
struct Sizes {
  Sizes(const Op& op, const Shape& shape, int lanes) {
    tokens = op.shape.w ? op.shape.w : int(shape.h) * shape.w;
    depth = op.window.kh;
    width = op.window.kw;
    row = rounded(tokens, lanes);
    query = depth * row;
    key = rounded(tokens, kPanel) * depth;
    value = rounded(width, kPanel) * tokens;
    scores = rounded(tokens, kPanel) * kMostQueries * lanes;
    out = width * row;
  }
  long total() const {
    long all = 0;
    for (long part : {query, key, value, scores, out}) all += rounded(part, 16);
    return all;
  }
  int tokens, depth, width;
  long row, query, key, value, scores, out;
};

class Attention final : public Step {
 public:
  Attention(const Op& op, std::vector<int> in, int to) : Step("attention", &op, std::move(in), to) {}
  void add_cost(const Program& p, Cost& cost) const override;
  void build(const Program& p) override;
  void run(const Member& m) const override;
  long scratch_floats(const Program& p) const override { return sizes(p).total(); }
  long macs(const Program& p) const override {
    const Sizes s = sizes(p);
    const Shape& shape = p.values[size_t(out)].shape;
    return long(shape.h) * shape.w * s.tokens * (s.depth + s.width) * op->groups * p.lanes.images;
  }
  long bytes() const override {
    long all = long(channels_.size() * sizeof(Channel)) + to_.bytes();
    for (const Places& p : from_) all += p.bytes();
    return all;
  }

 private:
  struct Channel {
    size_t input;
    int channel;
  };
  /// The numbers of one channel of one image, by token.
  struct Plane {
    const float* numbers;
    const int32_t* at;
    float operator[](int token) const { return numbers[at[token]]; }
  };
  Sizes sizes(const Program& p) const { return {*op, p.values[size_t(out)].shape, p.lanes.count}; }
  Plane plane(const Member& m, size_t number, int image, long first) const;
  void pack(const Member& m, const Sizes& s, int image, int window, int head, float* query, float* key, float* value) const;
  void settle_direct(const Program& p);
  void attend(const Member& m, int image, int window, int head) const;

  std::vector<Channel> channels_;
  std::vector<Places> from_;  // of every input with channels; their pixels in the order of tokens, window by window
  Places to_;
  bool direct_ = false;  // queries and results lie as the kernel takes them
};

void Attention::add_cost(const Program& p, Cost& cost) const {
  const Layout& to = *p.values[size_t(out)].layout;
  const Sizes s = sizes(p);
  const double pixels = double(to.shape.h) * to.shape.w, each = double(s.tokens) * (s.depth + s.width + 4) + 2 * s.depth;
  cost.tables += double(op->index.size()) * sizeof(Channel) + Places::bytes(to);
  for (int v : in) cost.tables += sizeof(Places) + Places::bytes(*p.values[size_t(v)].layout);
  cost.passing = std::max(cost.passing, 8.0 * double(in.size() + 1) + 4 * pixels);
  cost.work += pixels * each * op->groups * p.lanes.images;
}

void Attention::build(const Program& p) {
  const size_t parts = in.size() - size_t(op->count_pad);
  from_.resize(parts);
  for (size_t i = 0; i < parts; i++) from_[i].build(*p.values[size_t(in[i])].layout);
  to_.build(*p.values[size_t(out)].layout);
  std::vector<int> first{0};
  for (size_t i = 0; i < parts; i++) first.push_back(first.back() + p.values[size_t(in[i])].shape.c);
  channels_.reserve(op->index.size());
  for (uint32_t index : op->index) {
    const size_t i = size_t(std::upper_bound(first.begin(), first.end(), int(index)) - first.begin()) - 1;
    channels_.push_back({i, int(index) - first[i]});
  }
  settle_direct(p);
  if (op->tokens.empty()) return;
  const auto reorder = [&](std::vector<int32_t>& at) {
    const std::vector<int32_t> before = at;
    for (size_t t = 0; t < at.size(); t++) at[t] = before[op->tokens[t]];
  };
  for (Places& places : from_) reorder(places.at);
  reorder(to_.at);
}

/// One image, all of whose pixels attend to each other, without halos: vectors of a plane are vectors of queries, in an
/// order that the softmax does not see.
void Attention::settle_direct(const Program& p) {
  direct_ = p.lanes.images == 1 && op->tokens.empty() && op->table.empty() && sizes(p).tokens == int(to_.at.size());
  for (size_t i = 0; i <= from_.size(); i++) {
    const Geometry& g = p.values[size_t(i < from_.size() ? in[i] : out)].geometry;
    direct_ &= g.top + g.left + g.bottom + g.right == 0;
  }
  for (size_t c = 0; c < size_t(op->groups) * size_t(op->window.kh); c++)
    if (c % size_t(op->window.kh))
      direct_ &= channels_[c].input == channels_[c - 1].input && channels_[c].channel == channels_[c - 1].channel + 1;
}

Attention::Plane Attention::plane(const Member& m, size_t number, int image, long first) const {
  const Channel& c = channels_[number];
  const Places& places = from_[c.input];
  return {m.arena.value(in[c.input]) + c.channel * places.plane + image * places.image, places.at.data() + first};
}

void Attention::pack(const Member& m, const Sizes& s, int image, int window, int head, float* query, float* key,
                     float* value) const {
  const size_t keys = size_t(op->groups) * size_t(s.depth), own = size_t(head) * size_t(s.depth);
  const long first = long(window) * s.tokens;
  for (int d = 0; d < s.depth; d++) {
    const Plane q = plane(m, own + size_t(d), image, first), k = plane(m, keys + own + size_t(d), image, first);
    for (int t = 0; t < s.tokens && !direct_; t++) query[d * s.row + t] = q[t];
    for (int j = 0; j < s.tokens; j += kPanel) {
      float* panel = key + long(j) * s.depth + d * kPanel;
      for (int t = j; t < std::min(j + kPanel, s.tokens); t++) panel[t - j] = k[t];
    }
  }
  for (int d = 0; d < s.width; d++) {
    const Plane v = plane(m, 2 * keys + size_t(head) * size_t(s.width) + size_t(d), image, first);
    float* panel = value + long(d / kPanel) * kPanel * s.tokens + d % kPanel;
    for (int t = 0; t < s.tokens; t++) panel[long(t) * kPanel] = v[t];
  }
}

/// Packs queries, keys and values of one head as the kernel takes them, and spreads its result.
void Attention::attend(const Member& m, int image, int window, int head) const {
  const Sizes s(*op, layout(m, out).shape, m.program.lanes.count);
  float* const query = m.scratch;
  float* const key = query + rounded(s.query, 16);
  float* const value = key + rounded(s.key, 16);
  float* const scores = value + rounded(s.value, 16);
  float* const result = scores + rounded(s.scores, 16);
  pack(m, s, image, window, head, query, key, value);
  AttendArgs a{};
  a.query = query, a.key = key, a.value = value, a.scores = scores, a.out = result;
  a.query_step = a.out_step = s.row;
  a.queries = a.keys = s.tokens;
  if (direct_) {
    const Layout& to = layout(m, out);
    a.query = plane(m, size_t(head) * size_t(s.depth), 0, 0).numbers;
    a.query_step = from_[channels_[size_t(head) * size_t(s.depth)].input].plane;
    a.out = m.arena.planes(out).data + long(head) * s.width * to_.plane;
    a.out_step = to_.plane;
    a.queries = int(to.vectors()) * to.lanes.count;
  }
  a.depth = s.depth, a.width = s.width;
  a.scale = op->number;
  const long square = long(s.tokens) * s.tokens;
  const int heads = op->shape.h;
  if (!op->table.empty())
    a.added = op->table.data() + ((op->shape.c > 1 ? window : 0) * heads + (heads > 1 ? head : 0)) * square;
  if (op->count_pad) a.each = m.arena.value(in.back()) + long(image) * s.tokens;
  m.program.kernels.attend(a);
  if (direct_) return;
  float* floats = m.arena.value(out) + image * to_.image;
  for (int d = 0; d < s.width; d++) {
    float* to = floats + (long(head) * s.width + d) * to_.plane;
    for (int t = 0; t < s.tokens; t++) to[to_.at[size_t(window) * size_t(s.tokens) + size_t(t)]] = result[d * s.row + t];
  }
}

void Attention::run(const Member& m) const {
  const Range own = share(op->groups, m);
  const int width = op->window.kw, windows = int(long(to_.at.size()) / sizes(m.program).tokens);
  const Range channels{own.begin * width, own.end * width};
  for (int head = own.begin; head < own.end; head++)
    for (int n = 0; n < m.program.lanes.images; n++)
      for (int w = 0; w < windows; w++) attend(m, n, w, head);
  to_.clear(m.arena.value(out), channels);
  exchange(m, out, channels);
}

/// Every pixel once.
void check_tokens(const std::vector<uint32_t>& tokens, long pixels) {
  std::vector<bool> seen(static_cast<size_t>(pixels));
  require(long(tokens.size()) == pixels, "an attention's tokens are not all pixels");
  for (uint32_t t : tokens) {
    require(long(t) < pixels && !seen[t], "an attention's tokens are not all pixels, each once");
    seen[t] = true;
  }
}

Shape attention_shape(Op& op, const std::vector<Shape>& in) {
  const int last = int(in.size()) - op.count_pad;
  require(last >= 1, "an attention has too few inputs");
  long channels = 0;
  for (int i = 0; i < last; i++) {
    require(in[size_t(i)].h == in[0].h && in[size_t(i)].w == in[0].w, "an attention's inputs differ in shape");
    channels += in[size_t(i)].c;
  }
  const long pixels = long(in[0].h) * in[0].w, windows = op.shape.w ? pixels / op.shape.w : 1;
  const int depth = op.window.kh, width = op.window.kw;
  require(depth >= 1 && width >= 1 && channels <= (1 << 24) && op.index.size() <= (1 << 24), "an attention's sizes");
  require(op.weight.empty() && long(op.index.size()) == long(op.groups) * (2 * depth + width),
          "an attention's channels are not those of its heads");
  for (uint32_t channel : op.index) require(long(channel) < channels, "a chosen channel does not exist");
  require(!op.shape.w || windows * op.shape.w == pixels, "windows do not divide an attention's tokens");
  if (!op.tokens.empty()) check_tokens(op.tokens, pixels);
  const long tokens = pixels / windows;
  require(!op.table.empty() || (op.shape.c <= 1 && op.shape.h <= 1), "an attention has a shape of what is added, and adds nothing");
  require(op.table.empty() || ((op.shape.c == 1 || op.shape.c == windows) && (op.shape.h == 1 || op.shape.h == op.groups) &&
                               double(op.table.size()) == double(op.shape.c) * op.shape.h * double(tokens) * double(tokens)),
          "what an attention adds has another shape than its scores");
  if (op.count_pad)
    require(windows == 1 && in.back().size() == tokens && in.back().c == tokens, "what an attention adds to its keys has another length");
  return {op.groups * width, in[0].h, in[0].w};
}

void plan_attention(Planner& planner, const Op& op) {
  std::vector<int> in;
  const size_t last = op.in.size() - size_t(op.count_pad);
  const int first = planner.spatial(planner.value_of(op.in[0]));
  for (size_t i = 0; i < last; i++) in.push_back(planner.with_tiles(planner.value_of(op.in[i]), planner.value(first).geometry));
  if (op.count_pad) in.push_back(planner.flat(planner.value_of(op.in[last])));
  planner.set_value(op.out, planner.add_value(planner.shape_of(op.out), bare(planner.value(first).geometry), false));
  planner.add_step<Attention>(op, in, planner.value_of(op.out));
}

}  // namespace

extern const Operator kAttention = {"attention", 1, 1 << 12, false, false, attention_shape, plan_attention};

}  // namespace dcil
