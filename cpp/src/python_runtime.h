/**
 * @file python_runtime.h
 * @brief The interpreter: started if the process has none, and entered by calls.
 */
#ifndef LLM_DATADIST_SRC_PYTHON_RUNTIME_H_
#define LLM_DATADIST_SRC_PYTHON_RUNTIME_H_

#include <pybind11/pybind11.h>

namespace llm_datadist {
/**
 * @brief Make sure that there is an interpreter of the version that this was built for.
 *
 * One that is started here belongs to the environment of the executable LLM_DATADIST_PYTHON, handles no signals, and
 * stays until the process ends. Thread-safe; on return no lock is held.
 * @return false, after a line on standard error, if that is not possible
 */
bool StartPython() noexcept;

/** Holds the interpreter's lock. A thread's first one makes its thread state, which lives as long as the thread. */
class Gil {
 public:
  Gil() noexcept;
  ~Gil();
  Gil(const Gil &) = delete;
  Gil &operator=(const Gil &) = delete;

  /** False where the interpreter has ended already; then nothing is held. */
  explicit operator bool() const noexcept { return held_; }

 private:
  bool held_;
  PyGILState_STATE state_ = PyGILState_UNLOCKED;
};
}  // namespace llm_datadist

#endif  // LLM_DATADIST_SRC_PYTHON_RUNTIME_H_
