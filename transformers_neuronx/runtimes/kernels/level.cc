// The table of one instruction-set level's kernels.
#include "kernels.h"

namespace neuronx::NEURONX_LEVEL {

int64_t LinearScratch(const LinearArguments& arguments);
void Linear(LinearArguments* products, int64_t count, const Pool& pool);
void Attend(const AttentionArguments& arguments, const Pool& pool);
void AttendTo(const MemoryArguments& arguments, const Pool& pool);
int64_t SampleScratch(const SampleArguments& arguments);
void Sample(const SampleArguments& arguments, const Pool& pool);
void Normalize(const NormArguments& arguments, const Pool& pool);
int64_t LoraScratch(const LoraArguments& arguments);
void AddAdapters(const LoraArguments& arguments, const Pool& pool);
void ShortConvolution(const ConvolutionArguments& arguments, const Pool& pool);
void GatedDeltaRule(const LinearAttentionArguments& arguments, const Pool& pool);
void SelectiveScan(const LinearAttentionArguments& arguments, const Pool& pool);

#define STRING_(x) #x
#define STRING(x) STRING_(x)
extern const Kernels kernels = {STRING(NEURONX_LEVEL), LinearScratch, Linear, Attend, AttendTo, SampleScratch, Sample,
                                Normalize, LoraScratch, AddAdapters, ShortConvolution, GatedDeltaRule,
                                SelectiveScan};

}  // namespace neuronx::NEURONX_LEVEL
