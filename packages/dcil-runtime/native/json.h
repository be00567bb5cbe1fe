// A strict reader of JSON that pulls what the caller expects next: nothing is kept but what the caller keeps, so a
// description costs no more memory than what is in it. And strings as JSON, for what is written.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace dcil {

class Json {
 public:
  Json(const char* begin, const char* end) : at_(begin), end_(end) {}

  /// Calls `entry(key)` for each field, which reads its value.
  void object(const std::function<void(const std::string&)>& entry);
  /// Calls `entry()` for each element, which reads it.
  void list(const std::function<void()>& entry);
  std::string text();                           // UTF-8
  int64_t integer(int64_t low, int64_t high);   // without a point or an exponent
  double real();                                // with one of them
  bool null();                                  // consumes it if it is there
  void end();                                   // nothing but white space follows

 private:
  char peek();  // skips white space; 0 at the end
  bool next_is(char c);
  void expect(char c);
  std::string digits();
  uint32_t escaped_unit();
  void escaped(std::string& out);
  void utf8(std::string& out);

  const char *at_, *end_;
};

/// An object with given fields: each once, none missing but the optional ones, none unknown.
class Record {
 public:
  void field(const char* name, std::function<void()> read) { fields_.push_back({name, std::move(read), true}); }
  void optional(const char* name, std::function<void()> read) { fields_.push_back({name, std::move(read), false}); }
  void read(Json& json) const;

 private:
  struct Field {
    std::string name;
    std::function<void()> read;
    bool needed;
  };
  std::vector<Field> fields_;
};

/// `text`, which is UTF-8, between quotes.
std::string quoted(const std::string& text);

}  // namespace dcil
