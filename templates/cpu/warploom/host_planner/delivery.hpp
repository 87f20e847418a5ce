// Copies a plan from host memory to its device, in the call that wrote it: from Python the same
// driver functions take several times as long to reach as to run.
#pragma once

#include <cstddef>

namespace warploom {

// What `Delivery` of runtime/devices/delivery.py has, in this order.
struct Delivery {
  using Address = unsigned long long;  // on the device
  static constexpr int kStages = 4;
  struct Stage {
    void* event;  // recorded behind the last copy from `memory`
    int* memory;  // null: too short for the plan
  };

  // Driver functions, which return 0 on success; null where plans are written in place.
  int (*exchange_capture_mode)(int* mode);  // of this thread
  int (*is_capturing)(void* stream, int* status);
  int (*is_done)(void* event);
  int (*wait)(void* event);
  int (*copy_to_device)(Address to, const void* from, std::size_t bytes, void* stream);
  int (*copy_on_device)(Address to, Address from, std::size_t bytes, void* stream);
  int (*record)(void* event, void* stream);
  Address target;  // where the plan goes
  void* stream;
  Address pages;  // page numbers that lie on the device; 0: the plan holds them
  Stage stages[kStages];
  int last;  // the stage that was taken last

  bool is_remote() const { return copy_to_device != nullptr; }

  // Returns memory to write a plan to, which no copy reads: the last stage, which CPU caches hold,
  // if its copy is done; else the next stage, after waiting for its copy. Null if nothing may be
  // sent (the stream is being captured), if the memory is too short, or if a driver call fails.
  int* take() {
    if (!is_remote()) return stages[last].memory;
    int status = 0;
    if (is_capturing(stream, &status) != 0 || status != 0) return nullptr;
    int mode = kRelaxed;  // else the queries would break another thread's capture
    if (exchange_capture_mode(&mode) != 0) return nullptr;
    const bool is_free = may_write_to_last();
    exchange_capture_mode(&mode);
    return is_free ? stages[last].memory : nullptr;
  }

  // Enqueues the copies of a plan and of its `count` page numbers. False if the driver refuses one;
  // all may be enqueued again then. `p` says where the plan lies; has_pages: with page numbers.
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

// `p` for a plan at `memory`.
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
