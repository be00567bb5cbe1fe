#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <system_error>

#include "plan_file.h"

namespace dcil {

std::vector<uint8_t> content_of(const char* file, double most) {
  const auto fail = [&] { throw std::system_error(errno, std::generic_category(), file); };
  struct Descriptor {
    const int number;
    ~Descriptor() { if (number >= 0) close(number); }
  } opened{open(file, O_RDONLY | O_NONBLOCK | O_CLOEXEC)};  // opening a pipe would wait for its writer
  struct stat found;
  if (opened.number < 0 || fstat(opened.number, &found) != 0) fail();
  if (!S_ISREG(found.st_mode)) throw Error("it is not a regular file");  // reading a device may never end
  char text[160];
  std::snprintf(text, sizeof text, "it has %lld bytes, more than the limit of %.0f (raise max_memory to allow it)",
                static_cast<long long>(found.st_size), most);
  if (double(found.st_size) > most) throw Error(text);
  std::vector<uint8_t> bytes(size_t(found.st_size));
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t now = read(opened.number, bytes.data() + done, bytes.size() - done);
    if (now < 0 && errno == EINTR) continue;
    if (now < 0) fail();
    if (now == 0) bytes.resize(done);  // it shrinks while it is read
    done += size_t(now);
  }
  return bytes;
}

}  // namespace dcil
