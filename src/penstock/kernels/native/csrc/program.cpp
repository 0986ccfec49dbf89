#include "program.h"

#include <chrono>

#include "parallel.h"
#include "scratch.h"

namespace penstock {
namespace {

// Bytes per element of a step input.
int64_t element_size(InputType type) { return type == InputType::kInt64 ? 8 : 4; }

class Runner {
 public:
  Runner(const Program& program, const ProgramStep& step, ProgramOutcome& outcome)
      : program_(program), step_(step), outcome_(outcome), num_rows_(step.num_rows) {}

  // False on failure; the outcome names the collective that failed, if any.
  bool run(size_t begin, size_t end) {
    const auto& steps = program_.steps;
    for (size_t i = 0; i < begin; ++i) narrow(steps[i]);
    while (begin < end) {
      if (steps[begin].operation.type->scope == Scope::kStep) {
        if (!run(steps[begin], 0, num_rows_)) return false;
        narrow(steps[begin++]);
        continue;
      }
      size_t stop = begin;
      while (stop < end && steps[stop].operation.type->scope == Scope::kRows) ++stop;
      for (int64_t first = 0; first < num_rows_; first += program_.rows_at_once) {
        const int64_t left = num_rows_ - first;
        for (size_t i = begin; i < stop; ++i)
          if (!run(steps[i], first, left < program_.rows_at_once ? left : program_.rows_at_once)) return false;
      }
      begin = stop;
    }
    return true;
  }

 private:
  bool asks_for_last() const { return step_.last.count > 0; }

  void narrow(const Step& step) {
    if (step.narrows && asks_for_last()) num_rows_ = step_.last.count;
  }

  Rows rows(int number, int64_t first_row) const {
    if (number < 0) return {nullptr, 0};
    const Buffer& buffer = program_.buffers[number];
    if (buffer.kind == Buffer::Kind::kPart) {
      const int64_t rows = step_.num_rows < program_.rows_at_once ? step_.num_rows : program_.rows_at_once;
      return {step_.workspace + program_.whole_size * step_.num_rows + buffer.offset * rows, buffer.width};
    }
    float* begin;
    if (buffer.kind == Buffer::Kind::kInput)
      begin = static_cast<float*>(const_cast<void*>(step_.inputs[buffer.offset]));
    else
      begin = (buffer.kind == Buffer::Kind::kOutput ? step_.output : step_.workspace) + buffer.offset * step_.num_rows;
    return {begin + first_row * buffer.width, buffer.width};
  }

  // Elements of a step input from a row on; nullptr where allocation for the last tokens' elements fails.
  const void* elements(const Step& step, int64_t first_row, int64_t num_rows) const {
    const auto* all = static_cast<const char*>(step_.inputs[step.input]);
    if (!step.reads_last || !asks_for_last()) return all + first_row * element_size(step.operation.type->input);
    static thread_local Scratch scratch;
    auto* of_last = reinterpret_cast<int32_t*>(scratch.get(static_cast<size_t>(num_rows)));
    for (int64_t i = 0; of_last != nullptr && i < num_rows; ++i)
      of_last[i] = reinterpret_cast<const int32_t*>(all)[step_.last.rows[first_row + i]];
    return of_last;
  }

  bool run(const Step& step, int64_t first_row, int64_t num_rows) {
    Call call{program_.kernels,
              rows(step.x, first_row),
              rows(step.second, first_row),
              rows(step.out, first_row),
              nullptr,
              nullptr,
              nullptr,
              first_row,
              num_rows,
              step_.num_threads,
              &step_};
    if (step.operation.type->chooses) {
      call.index = step_.index + first_row;
      call.failed = step_.failed + first_row;
    }
    if (step.input >= 0) {
      call.input = elements(step, first_row, num_rows);
      if (call.input == nullptr) return false;
    }
    const auto number = &step - program_.steps.data();
    const Result result = program_.nanoseconds.empty() ? step.operation.type->run(step.operation, call)
                                                       : timed(step, call, program_.nanoseconds[number]);
    if (result.status != 0) outcome_ = {true, result.status, number, num_rows};
    return result.is_good();
  }

  static Result timed(const Step& step, const Call& call, int64_t& nanoseconds) {
    const auto begin = std::chrono::steady_clock::now();
    const Result result = step.operation.type->run(step.operation, call);
    nanoseconds += std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count();
    return result;
  }

  const Program& program_;
  const ProgramStep& step_;
  ProgramOutcome& outcome_;
  int64_t num_rows_;  // rows that the program continues with
};

struct Run {
  const Program& program;
  const ProgramStep& step;
  size_t begin, end;
  ProgramOutcome outcome;
};

void run_on_crew(void* data) {
  auto* run = static_cast<Run*>(data);
  const bool is_done = Runner(run->program, run->step, run->outcome).run(run->begin, run->end);
  run->outcome.had_memory = is_done || run->outcome.collective_status != 0;
}

}  // namespace

ProgramOutcome run_program(const Program& program, const ProgramStep& step, size_t begin, size_t end) {
  Run run{program, step, begin, end, {}};
  with_threads_standing_by(step.num_threads, run_on_crew, &run);
  return run.outcome;
}

}  // namespace penstock
