#include "json.h"

#include <cstring>
#include <locale>
#include <sstream>

#include "error.h"

namespace dcil {

namespace {

constexpr const char* kNotJson = "its description is not JSON";

void append_utf8(std::string& out, uint32_t code) {
  const auto tail = [&](int shift) { out += char(0x80 | (code >> shift & 0x3f)); };
  if (code < 0x80) return void(out += char(code));
  if (code < 0x800) return out += char(0xc0 | code >> 6), tail(0);
  if (code < 0x10000) return out += char(0xe0 | code >> 12), tail(6), tail(0);
  out += char(0xf0 | code >> 18), tail(12), tail(6), tail(0);
}

}  // namespace

char Json::peek() {
  while (at_ < end_ && std::strchr(" \t\r\n", *at_) && *at_) at_++;
  return at_ < end_ ? *at_ : 0;
}

bool Json::next_is(char c) {
  if (peek() != c) return false;
  at_++;
  return true;
}

void Json::expect(char c) { require(next_is(c), kNotJson); }

void Json::end() { require(peek() == 0 && at_ == end_, kNotJson); }

void Json::object(const std::function<void(const std::string&)>& entry) {
  require(next_is('{'), "a field is not an object");
  if (next_is('}')) return;
  do {
    const std::string key = text();
    expect(':');
    entry(key);
  } while (next_is(','));
  expect('}');
}

void Json::list(const std::function<void()>& entry) {
  require(next_is('['), "a field is not a list");
  if (next_is(']')) return;
  do entry();
  while (next_is(','));
  expect(']');
}

std::string Json::text() {
  require(next_is('"'), "a field is not a text");
  std::string out;
  for (;;) {
    require(at_ < end_ && uint8_t(*at_) >= 0x20, kNotJson);
    if (*at_ == '"') return at_++, out;
    if (*at_ == '\\')
      escaped(out);
    else
      utf8(out);
  }
}

/// Four hexadecimal digits after "\u".
uint32_t Json::escaped_unit() {
  require(end_ - at_ >= 6 && at_[0] == '\\' && at_[1] == 'u', "a text has half of a surrogate pair");
  uint32_t unit = 0;
  for (int i = 2; i < 6; i++) {
    const char c = at_[i];
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
    require(digit >= 0, kNotJson);
    unit = unit * 16 + uint32_t(digit);
  }
  at_ += 6;
  return unit;
}

void Json::escaped(std::string& out) {
  static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
  require(end_ - at_ >= 2, kNotJson);
  if (at_[1] != 'u') {
    const char* found = at_[1] ? std::strchr(names, at_[1]) : nullptr;
    require(found != nullptr, kNotJson);
    out += values[found - names];
    at_ += 2;
    return;
  }
  uint32_t code = escaped_unit();
  require(code < 0xdc00 || code > 0xdfff, "a text has half of a surrogate pair");
  if (code >= 0xd800 && code < 0xdc00) {
    const uint32_t low = escaped_unit();
    require(low >= 0xdc00 && low <= 0xdfff, "a text has half of a surrogate pair");
    code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
  }
  append_utf8(out, code);
}

/// One character in its shortest form, no half of a surrogate pair.
void Json::utf8(std::string& out) {
  static const uint32_t least[] = {0, 0x80, 0x800, 0x10000};
  const uint8_t first = uint8_t(*at_);
  const int more = first < 0x80 ? 0 : first >> 5 == 6 ? 1 : first >> 4 == 14 ? 2 : first >> 3 == 30 ? 3 : -1;
  require(more >= 0 && end_ - at_ > more, kNotJson);
  uint32_t code = more ? first & (0x3f >> more) : first;
  for (int i = 1; i <= more; i++) {
    require((at_[i] & 0xc0) == 0x80, kNotJson);
    code = code << 6 | (at_[i] & 0x3f);
  }
  require(code >= least[more] && code <= 0x10ffff && (code < 0xd800 || code > 0xdfff), kNotJson);
  out.append(at_, size_t(more) + 1);
  at_ += more + 1;
}

/// The characters of a number, which must have JSON's form.
std::string Json::digits() {
  peek();
  const char* begin = at_;
  const auto some = [&] {
    const char* from = at_;
    while (at_ < end_ && *at_ >= '0' && *at_ <= '9') at_++;
    require(at_ > from, "a field is not a number");
  };
  const auto skip = [&](const char* any) { return at_ < end_ && *at_ && std::strchr(any, *at_) && at_++; };
  skip("-");
  const char* whole = at_;
  some();
  require(*whole != '0' || at_ == whole + 1, kNotJson);
  if (skip(".")) some();
  if (skip("eE")) skip("+-"), some();
  return std::string(begin, at_);
}

int64_t Json::integer(int64_t low, int64_t high) {
  const std::string number = digits();
  // Eighteen digits fit an int64, and no range here needs more.
  const bool fits = number.find_first_of(".eE") == std::string::npos && number.size() <= 18;
  const int64_t value = fits ? std::stoll(number) : high;
  if (!fits || value < low || value > high)
    throw Error("a number is not a whole one from " + std::to_string(low) + " to " + std::to_string(high));
  return value;
}

double Json::real() {
  const std::string number = digits();
  require(number.find_first_of(".eE") != std::string::npos, "a whole number where a real one must be");
  std::istringstream stream(number);
  stream.imbue(std::locale::classic());  // whatever the program's language writes for a decimal point
  double value = 0;
  require(bool(stream >> value), "a number is too large");
  return value;
}

bool Json::null() {
  if (peek() != 'n') return false;
  require(end_ - at_ >= 4 && std::memcmp(at_, "null", 4) == 0, kNotJson);
  at_ += 4;
  return true;
}

void Record::read(Json& json) const {
  std::vector<bool> seen(fields_.size());
  json.object([&](const std::string& key) {
    size_t i = 0;
    while (i < fields_.size() && fields_[i].name != key) i++;
    require(i < fields_.size(), "a field is missing or unknown");
    require(!seen[i], "a field is there twice");
    seen[i] = true;
    fields_[i].read();
  });
  for (size_t i = 0; i < fields_.size(); i++) require(seen[i] || !fields_[i].needed, "a field is missing or unknown");
}

std::string quoted(const std::string& text) {
  static const char hexadecimal[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\')
      out += '\\', out += c;
    else if (uint8_t(c) < 0x20)
      out += "\\u00", out += hexadecimal[c >> 4], out += hexadecimal[c & 15];
    else
      out += c;
  }
  return out += '"';
}

}  // namespace dcil
