// Local copies of what gcc 9 and later, and glibc 2.32 and later, would import from the system's libraries, so that the
// library also runs where those are older (manylinux_2_28). Knows nothing of the ops.
#include <new>
#include <sstream>

template class std::basic_stringstream<char>;
template class std::basic_ostringstream<char>;

extern "C" {
// Read by libstdc++'s inlined shared_ptr; false only costs atomic reference counts.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

namespace std {
// Called by new[] of too many elements; libstdc++ exports it since gcc 11. exports.map keeps it from others. Weak, so that a
// compiler that has libstdc++ as an archive alone takes the archive's.
__attribute__((weak)) void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
