// Local copies of what gcc 9 and later, and glibc 2.32 and later, would import from the system's libraries, so that the
// library also runs where those are older (manylinux_2_28). Knows nothing of the ops.
#include <sstream>

template class std::basic_stringstream<char>;
template class std::basic_ostringstream<char>;

extern "C" {
// Read by libstdc++'s inlined shared_ptr; false only costs atomic reference counts.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
