// Brings a plan from memory of the host to its device, in the call that wrote it: from Python the
// same functions of the driver take several times as long to reach as to run.
#pragma once

#include <cstddef>

namespace warploom {

// What `Delivery` of runtime/devices/delivery.py has, in this order.
struct Delivery {
  using Address = unsigned long long;  // on the device
  static constexpr int kStages = 4;
  struct Stage {
    void* event;  // behind the last copy of what lies there
    int* memory;  // null: too short for the plan
  };

  // Of the driver, 0 if nothing is wrong; null where plans are written to where they are read.
  int (*exchange_capture_mode)(int* mode);  // of this thread
  int (*is_capturing)(void* stream, int* status);
  int (*is_done)(void* event);
  int (*wait)(void* event);
  int (*copy_to_device)(Address to, const void* from, std::size_t bytes, void* stream);
  int (*copy_on_device)(Address to, Address from, std::size_t bytes, void* stream);
  int (*record)(void* event, void* stream);
  Address target;  // of the plan
  void* stream;
  Address pages;  // page numbers that stay on the device; 0: the plan holds them
  Stage stages[kStages];
  int last;  // that was taken

  bool is_remote() const { return copy_to_device != nullptr; }

  // Memory to write a plan to, which no copy reads: the last, which caches hold, if its copy is
  // done, or else the next, whose copy is waited for. Null where nothing may be sent, where it is
  // too short, or where the driver cannot tell.
  int* take() {
    if (!is_remote()) return stages[last].memory;
    int status = 0;
    if (is_capturing(stream, &status) != 0 || status != 0) return nullptr;
    int mode = kRelaxed;  // or asking would break the capture of another thread
    if (exchange_capture_mode(&mode) != 0) return nullptr;
    const bool is_free = may_write_to_last();
    exchange_capture_mode(&mode);
    return is_free ? stages[last].memory : nullptr;
  }

  // Enqueues the copies of a plan and of its `count` page numbers. False if the driver refuses one;
  // all may be enqueued again then. `Params` say where the plan lies, and if it has the numbers.
  template <class Params>
  bool send(const Params& p, int count, bool has_pages) const {
    const auto before = sizeof(int) * (p.indices - p.header), of_pages = sizeof(int) * count;
    if (!has_pages && count > 0) {
      if (pages == 0 || copy_on_device(target + before, pages, of_pages, stream) != 0) return false;
    }
    const auto bytes = has_pages ? before + of_pages : before;
    return copy_to_device(target, p.header, bytes, stream) == 0 &&
           record(stages[last].event, stream) == 0;
  }

 private:
  static constexpr int kRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED

  bool may_write_to_last() {
    if (is_done(stages[last].event) == 0) return true;
    last = (last + 1) % kStages;
    return wait(stages[last].event) == 0;
  }
};
static_assert(sizeof(Delivery) == 19 * 8, "18 numbers of 64 bits, one of 32, and 4 bytes");

// The same parameters for a plan that is to lie elsewhere.
template <class Params>
Params planning_to(const Params& p, int* memory) {
  int* Params::* const parts[] = {&Params::header,   &Params::cta_indptr, &Params::openings,
                                  &Params::segments, &Params::merges,     &Params::items,
                                  &Params::indices};
  Params moved = p;
  for (const auto part : parts) moved.*part = memory + (p.*part - p.header);
  return moved;
}

}  // namespace warploom
