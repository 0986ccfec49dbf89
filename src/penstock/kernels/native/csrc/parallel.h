// Fork and join on the threads that torch already has.
#pragma once

namespace penstock {

// What all threads of a region share.
struct Team {
  int num_threads;
  // Waits until every thread of the region has come here.
  void (*barrier)();
};

// Runs body(data, thread, team) on `num_threads` threads, the calling one among them, and waits for all of them.
//
// The threads are those of the OpenMP runtime that is loaded in this process, torch's: a pool of our own would
// compete with them. Without such a runtime everything runs on the calling thread.
void run_parallel(int num_threads, void (*body)(void* data, int thread, const Team& team), void* data);

// Calls main(data) on the calling thread, with `num_threads` threads that stand by: what it runs in parallel meanwhile
// begins and ends with a word in memory, where opening a region each time would cost several microseconds.
void with_threads_standing_by(int num_threads, void (*main)(void* data), void* data);

// Name of the library whose threads are used, or nullptr.
const char* runtime_name();

}  // namespace penstock
