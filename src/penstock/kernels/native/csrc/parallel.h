// Fork and join on torch's thread pool.
#pragma once

namespace penstock {

// Threads of a parallel region.
struct Team {
  int num_threads;
  // Barrier of all threads of the region.
  void (*barrier)();
};

// Runs body(data, thread, team) on `num_threads` threads, the calling one included, and waits for all of them.
//
// The threads belong to the OpenMP runtime loaded in this process, torch's: a second pool would compete with it.
// Without such a runtime everything runs on the calling thread.
void run_parallel(int num_threads, void (*body)(void* data, int thread, const Team& team), void* data);

// Calls main(data) on the calling thread, with `num_threads` threads that spin for work: parallel regions inside it
// start and end with an atomic word, where opening an OpenMP region each time would cost several microseconds.
void with_threads_standing_by(int num_threads, void (*main)(void* data), void* data);

// Notes, before a wait for another process, that the threads standing by have no work for that long.
void note_wait_elsewhere();

// Name of the OpenMP library in use, or nullptr.
const char* runtime_name();

}  // namespace penstock
