// What the machine and its cgroups say is left, read from files as kernels of both versions write them.

#include "core/memory_left.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "check.h"

using torchtp::lack_of_memory;

namespace {

namespace fs = std::filesystem;

// The files of a kernel below a folder that is gone with this.
class Kernel {
 public:
  explicit Kernel(const std::string& free_swap = "0") {
    char name[] = "/tmp/memory_left_XXXXXX";
    root_ = mkdtemp(name);
    write("/proc/meminfo", "MemTotal: 4096000 kB\nMemAvailable: 1024000 kB\nSwapFree: " + free_swap + " kB\n");
  }
  ~Kernel() { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& text) const {
    fs::create_directories(fs::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  std::string lack(size_t megabytes) const { return lack_of_memory(megabytes << 20, root_); }

 private:
  std::string root_;
};

void the_machine_has_an_end() {
  const Kernel kernel;
  CHECK_EQUAL(kernel.lack(900), "");
  CHECK_EQUAL(kernel.lack(999), "the machine has 1,048,576,000 bytes left");  // what a process needs besides
  CHECK_EQUAL(kernel.lack(size_t{1} << 43), "the machine has 1,048,576,000 bytes left");
  CHECK_EQUAL(Kernel("204800").lack(1100), "");
  CHECK_EQUAL(lack_of_memory(size_t{1} << 62, "/nowhere"), "");
  CHECK_EQUAL(lack_of_memory(1), "");
}

void put_two(const Kernel& kernel, const std::string& folder, const std::string& limit, const std::string& usage) {
  kernel.write(folder + "/memory.max", limit + "\n");
  kernel.write(folder + "/memory.current", usage + "\n");
}

void the_tightest_cgroup_of_version_two_decides() {
  const Kernel kernel("102400");
  kernel.write("/proc/self/cgroup", "0::/jobs/mine\n");
  kernel.write("/proc/self/mountinfo",
               "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
  put_two(kernel, "/sys/fs/cgroup/jobs", "209715200", "104857600");
  put_two(kernel, "/sys/fs/cgroup/jobs/mine", "max", "52428800");
  kernel.write("/sys/fs/cgroup/jobs/memory.swap.max", "0\n");
  kernel.write("/sys/fs/cgroup/jobs/memory.swap.current", "0\n");
  CHECK_EQUAL(kernel.lack(90), "");
  CHECK_EQUAL(kernel.lack(95), "cgroup /jobs has 104,857,600 bytes left");
  kernel.write("/sys/fs/cgroup/jobs/memory.stat", "anon 1\ninactive_file 10485760\nslab_reclaimable 1048576\n");
  CHECK_EQUAL(kernel.lack(100), "");
  CHECK_EQUAL(kernel.lack(110), "cgroup /jobs has 116,391,936 bytes left");
  kernel.write("/sys/fs/cgroup/jobs/memory.swap.max", "max\n");
  CHECK_EQUAL(kernel.lack(200), "");
  put_two(kernel, "/sys/fs/cgroup/jobs/mine", "52428800", "52428801");
  kernel.write("/sys/fs/cgroup/jobs/mine/memory.swap.max", "0\n");
  CHECK_EQUAL(kernel.lack(1), "cgroup /jobs/mine has 0 bytes left");
}

void a_container_sees_its_own_part_of_version_one() {
  const Kernel kernel;
  kernel.write("/proc/self/cgroup", "5:cpu,cpuacct:/c/12\n4:memory:/docker/12\n0::/\n");
  kernel.write("/proc/self/mountinfo",
               "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
               "34 31 0:30 /docker/12 /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu,cpuacct\n"
               "35 31 0:29 /docker/12 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
  CHECK_EQUAL(kernel.lack(900), "");
  const std::string folder = "/sys/fs/cgroup/memory/memory.";
  kernel.write(folder + "limit_in_bytes", "104857600\n");
  kernel.write(folder + "usage_in_bytes", "94371840\n");
  kernel.write(folder + "stat",
               "cache 94371840\ninactive_file 1\ntotal_inactive_file 52428800\ntotal_active_file 10485760\n");
  CHECK_EQUAL(kernel.lack(60), "");
  CHECK_EQUAL(kernel.lack(65), "cgroup / has 73,400,320 bytes left");
  kernel.write(folder + "limit_in_bytes", "9223372036854771712\n");
  CHECK_EQUAL(kernel.lack(900), "");
  kernel.write(folder + "memsw.limit_in_bytes", "104857600\n");
  kernel.write(folder + "memsw.usage_in_bytes", "94371840\n");
  CHECK_EQUAL(kernel.lack(65), "cgroup / has 73,400,320 bytes left");
}

}  // namespace

int main() {
  return torchtp::test::run({
      {"the machine has an end", the_machine_has_an_end},
      {"the tightest cgroup of version two decides", the_tightest_cgroup_of_version_two_decides},
      {"a container sees its own part of version one", a_container_sees_its_own_part_of_version_one},
  });
}
