#include "program.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "planner.h"

namespace dcil {

Program::Program(const Graph& g, const KernelSet& k, int images, int threads)
    : graph(g), kernels(k), lanes(arrange(k.lanes, images)), threads(threads), byte_lanes_(byte_lanes(lanes)) {
  Planner(*this).plan();
  for (int i = 0; i < g.inputs(); i++)
    if (double(lanes.count) * double(g.shapes()[size_t(i)].size()) >= double(1L << 31)) throw Error("the input is too large");
  for (Value& v : values) v.layout = std::make_unique<Layout>(v.shape, v.geometry, lanes_of(v));
  for (auto& step : steps) step->settle(*this);
  assign_slots();
}

void Program::build() {
  for (Value& v : values) v.layout->build();
  for (int i = 0; i < graph.inputs(); i++) {
    const Layout& to = *values[size_t(i)].layout;
    const Shape& in = to.shape;
    const auto source = [&](int image, int y, int x) { return long(image) * in.size() + long(y) * in.w + x; };
    input_tables.push_back(to.geometry.flat ? std::vector<int32_t>() : gather_table(to, source));
  }
  for (auto& step : steps) step->build(*this);
}

/// Does this step read the operand that its output could replace for the last time, and do both lie in memory alike?
bool Program::may_replace(const Step& step, int now, const std::vector<int>& last_read) const {
  const int operand = step.replaceable();
  if (operand < 0 || last_read[size_t(operand)] != now) return false;
  const Value &from = values[size_t(operand)], &to = values[size_t(step.out)];
  return from.shape == to.shape && from.geometry == to.geometry && bool(from.quant) == bool(to.quant);
}

/// A new slot. But a value with zeros to keep takes one that lies in memory just the same if it is free at step `now`:
/// the zeros in the halos of one are the zeros of the other.
int Program::slot_for(const Value& value, int now) {
  const bool keeps = value.layout->keeps_zeros();
  for (size_t s = 0; keeps && s < slots_.size(); s++)
    if (slots_[s].until < now && slots_[s].shape == value.shape && slots_[s].geometry == value.geometry) return int(s);
  const long floats = (value.layout->floats() + 63) / 64 * 64 + 64;
  slots_.push_back({value.shape, value.geometry, keeps, floats, now, now, 0});
  return int(slots_.size()) - 1;
}

/// Values that are never alive together share memory: what fits the cache need not come from further away. An output
/// that can take its residual's place does.
void Program::assign_slots() {
  std::vector<int> last(values.size(), -1);
  for (size_t i = 0; i < steps.size(); i++)
    for (int v : steps[i]->reads()) last[v] = int(i);
  for (int v : outputs) last[v] = int(steps.size());
  const auto place = [&](int v, int now) {
    if (values[v].slot < 0) values[v].slot = slot_for(values[v], now);  // a concatenation writes its output repeatedly
    slots_[values[v].slot].until = std::max(last[v], now);
  };
  for (int i = 0; i < graph.inputs(); i++) place(i, -1);
  for (size_t i = 0; i < steps.size(); i++) {
    Step& step = *steps[i];
    step.in_place = may_replace(step, int(i), last);
    if (step.in_place) values[step.out].slot = values[step.replaceable()].slot;
    for (int v : step.writes()) place(v, int(i));
  }
  place_slots();
}

/// The largest first, each as low as nobody else is at any time in its life. Zeros are kept for ever.
void Program::place_slots() {
  std::vector<Slot*> placed, waiting;
  for (Slot& slot : slots_) waiting.push_back(&slot);
  std::stable_sort(waiting.begin(), waiting.end(), [](Slot* a, Slot* b) { return a->floats > b->floats; });
  const auto meet = [](const Slot& a, const Slot& b) {
    return a.keeps_zeros || b.keeps_zeros || (a.from <= b.until && b.from <= a.until);
  };
  for (Slot* slot : waiting) {
    for (const Slot* other : placed)  // in the order of their offsets
      if (meet(*slot, *other) && other->offset < slot->offset + slot->floats)
        slot->offset = std::max(slot->offset, other->offset + other->floats);
    const auto behind = [](const Slot* a, const Slot* b) { return a->offset < b->offset; };
    placed.insert(std::upper_bound(placed.begin(), placed.end(), slot, behind), slot);
    arena_ = std::max(arena_, slot->offset + slot->floats);
  }
}

long Program::scratch_floats() const {
  long most = lanes.count;
  for (const auto& step : steps) most = std::max(most, step->scratch_floats(*this));
  return most;
}

long Program::packed_bytes() const {
  long bytes = 0;
  for (const auto& table : input_tables) bytes += long(table.size()) * 4;
  for (const auto& step : steps) bytes += step->bytes();
  return bytes;
}

namespace {

/// Asked before a large allocation, because Linux grants any and kills later.
size_t available_memory() {
#ifdef __linux__
  return size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
#else
  return SIZE_MAX;
#endif
}

}  // namespace

Arena::Arena(const Program& program) : program_(program) {
  const size_t page = size_t(2) << 20;  // planes lie kilobytes apart: small pages would miss the TLB all the time
  const size_t bytes = (size_t(program.arena_floats()) * 4 + page - 1) / page * page;
  if (bytes > available_memory() / 2) throw Error("its activations need more than half of this machine's memory");
  data_ = static_cast<float*>(std::aligned_alloc(page, bytes));
  if (!data_) throw std::bad_alloc();
#ifdef __linux__
  madvise(data_, bytes, MADV_HUGEPAGE);
#endif
  std::memset(data_, 0, bytes);
}

Arena::~Arena() { std::free(data_); }

}  // namespace dcil
