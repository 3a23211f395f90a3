// cc: -O2 -shared -fPIC
// A filter for `perf script --dlfilter`: no sample reaches perf's output, so that what is timed is perf's decoder.
//
//     --dlarg COUNTS [--dlarg BRANCHES --dlarg HITS]
//
// Writes how many samples there were as a line of JSON into the file COUNTS and, where they are named, the branches as
// records of 24 bytes (from, to, perf's flags as u32, 4 bytes 0) and the PTWRITEs as records of 32 bytes (branches before
// it, value, address, ns) into the others.

#include <inttypes.h>
#include <perf/perf_dlfilter.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

struct perf_dlfilter_fns perf_dlfilter_fns;

struct branch { uint64_t from, to; uint32_t flags, zero; };
struct hit { uint64_t branches, value, ip, ns; };

static struct {
	uint64_t branches, hits, others;
	const char *counts;
	FILE *branch_file, *hit_file;
} found;

// What perf calls its events; the same pointer for every sample of one.
static const char *branches_name, *ptwrite_name;

static FILE *output(const char *path)
{
	FILE *file = fopen(path, "wbe");
	if (file)
		setvbuf(file, NULL, _IOFBF, 1 << 20);
	return file;
}

int start(void **data, void *ctx)
{
	int count = 0;
	char **words = perf_dlfilter_fns.args(ctx, &count);
	(void)data;
	if (count != 1 && count != 3)
		return -1;
	found.counts = words[0];
	if (count == 3) {
		found.branch_file = output(words[1]);
		found.hit_file = output(words[2]);
		if (!found.branch_file || !found.hit_file)
			return -1;
	}
	return 0;
}

static void learn(const char *event)
{
	if (!strncmp(event, "branches", 8))
		branches_name = event;
	else if (!strncmp(event, "ptwrite", 7))
		ptwrite_name = event;
}

int filter_event_early(void *data, const struct perf_dlfilter_sample *sample, void *ctx)
{
	(void)data;
	(void)ctx;
	if (sample->event != branches_name && sample->event != ptwrite_name)
		learn(sample->event);
	if (sample->event == branches_name) {
		found.branches++;
		if (found.branch_file) {
			struct branch record = { sample->ip, sample->addr, sample->flags, 0 };
			fwrite(&record, sizeof(record), 1, found.branch_file);
		}
	} else if (sample->event == ptwrite_name && sample->raw_size >= 12) {
		// Flags as u32 (bit 0: the address is that of the instruction), then the value.
		struct hit record = { found.branches, 0, sample->ip, sample->time };
		memcpy(&record.value, (const char *)sample->raw_data + 4, sizeof(record.value));
		found.hits++;
		if (found.hit_file)
			fwrite(&record, sizeof(record), 1, found.hit_file);
	} else {
		found.others++;
	}
	return 1;
}

static int closed(FILE *file)
{
	return !file || !(ferror(file) | fclose(file));
}

int stop(void *data, void *ctx)
{
	(void)data;
	(void)ctx;
	if (!closed(found.branch_file) || !closed(found.hit_file))
		return -1;
	FILE *file = output(found.counts);
	if (!file)
		return -1;
	fprintf(file, "{\"branches\": %" PRIu64 ", \"hits\": %" PRIu64 ", \"others\": %" PRIu64 "}\n", found.branches,
		found.hits, found.others);
	return closed(file) ? 0 : -1;
}

const char *filter_description(const char **long_description)
{
	*long_description = "Drops every sample; counts or writes branches and PTWRITEs.";
	return "drops and counts";
}
