// The library's module in Python.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstring>

#include "handlers.h"
#include "kernels.h"
#include "levels.h"

namespace neuronx {
namespace {

PyObject* HandlersByName(PyObject*, PyObject*) {
  PyObject* handlers = PyDict_New();
  for (const auto& [name, handle] : Handlers()) {
    PyObject* capsule = handlers ? PyCapsule_New(reinterpret_cast<void*>(handle), nullptr, nullptr) : nullptr;
    if (!capsule || PyDict_SetItemString(handlers, name, capsule)) return nullptr;
    Py_DECREF(capsule);
  }
  return handlers;
}

PyObject* Limits(PyObject*, PyObject*) {
  return Py_BuildValue("{sLsLsLsLsLsLsL}", "parts", static_cast<long long>(kMostParts), "group",
                       static_cast<long long>(kLargestGroup), "head", static_cast<long long>(kLongestHead), "biases",
                       static_cast<long long>(kMostBiases), "page", static_cast<long long>(kPage), "taps",
                       static_cast<long long>(kMostTaps), "key", static_cast<long long>(kLongestKey));
}

PyObject* SpentSoFar(PyObject*, PyObject*) {
  PyObject* all = PyDict_New();
  for (const Spent* each : AllSpent()) {
    const double seconds = static_cast<double>(each->nanoseconds.load()) * 1e-9;
    PyObject* pair = Py_BuildValue("(Ld)", static_cast<long long>(each->calls.load()), seconds);
    if (!all || !pair || PyDict_SetItemString(all, each->name, pair)) return nullptr;
    Py_DECREF(pair);
  }
  return all;
}

PyObject* LevelNames(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (const Kernels* each : Levels()) {
    PyObject* name = PyUnicode_FromString(each->name);
    if (!name || PyList_Append(names, name)) return nullptr;
    Py_DECREF(name);
  }
  return names;
}

PyObject* SetLevelByName(PyObject*, PyObject* name) {
  const char* wanted = PyUnicode_AsUTF8AndSize(name, nullptr);
  if (!wanted) return nullptr;
  for (const Kernels* each : Levels()) {
    if (std::strcmp(each->name, wanted) == 0) {
      SetLevel(*each);
      Py_RETURN_NONE;
    }
  }
  PyErr_Format(PyExc_ValueError, "this processor has no instructions of the level %s", wanted);
  return nullptr;
}

PyMethodDef methods[] = {
    {"handlers", HandlersByName, METH_NOARGS, "A capsule for each kernel, by the name of the composite."},
    {"limits", Limits, METH_NOARGS, "The largest sizes that kernels take, and the smallest page, by name."},
    {"spent", SpentSoFar, METH_NOARGS, "Calls of each kernel so far, and the seconds that they took."},
    {"levels", LevelNames, METH_NOARGS, "The levels of instructions that this processor has, the best one last."},
    {"set_level", SetLevelByName, METH_O, "Use the instructions of a level from now on."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernels", "Kernels for the CPU.", -1, methods};

}  // namespace
}  // namespace neuronx

PyMODINIT_FUNC PyInit__kernels() { return PyModule_Create(&neuronx::definition); }
