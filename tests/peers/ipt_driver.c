// cc: -O2 -lipt
// Decodes a raw Intel PT buffer with libipt and tells what it found, and what that cost, as one line of JSON.
//
//     ipt_driver blocks|insns|packets AUX [--image PATH:FILE_OFFSET:SIZE:ADDRESS]... [--branches OUT] [--hits OUT]
//
// "insns" walks instruction by instruction and knows every taken branch; OUT takes them as records of 24 bytes (from,
// to, kind as enum kind, 7 bytes 0), and the PTWRITEs as records of 32 bytes (branches before it, value, address, TSC).
// "blocks" is libipt's fastest way through code and only counts; "packets" reads no code at all.
//
// After an error it goes on at the next PSB, as ptxed does. It always ends: neither a resynchronisation that gets nowhere
// nor code that loops without need of a packet holds it up.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <intel-pt.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

enum kind {
	COND, JUMP, INDIRECT_JUMP, CALL, INDIRECT_CALL, RETURN, SYSCALL, FAR_RETURN, INTERRUPT,
	TRACE_START, TRACE_END, TX_ABORT, FAR_OTHER
};

struct branch { uint64_t from, to; uint8_t kind, zero[7]; };
struct hit { uint64_t branches, value, ip, tsc; };
struct fault { uint64_t offset; enum pt_error_code code; };

// Faults that are named; more are only counted.
#define FAULTS 64
// Instructions or blocks without a byte of trace used before it counts as an endless loop.
#define STRIDE (1u << 17)

static struct {
	uint64_t insns, blocks, packets, branches, hits, faults;
	struct fault fault[FAULTS];
	FILE *branch_file, *hit_file;
} found;

// Whether single instructions are seen, which alone tell taken branches.
static bool walks_insns;

static uint8_t *trace;
static size_t trace_size;

static void die(const char *what, const char *why)
{
	fprintf(stderr, "ipt_driver: %s: %s\n", what, why);
	exit(2);
}

static void fault(uint64_t offset, enum pt_error_code code)
{
	if (found.faults < FAULTS)
		found.fault[found.faults] = (struct fault){ offset, code };
	found.faults++;
}

static void branch(uint64_t from, uint64_t to, enum kind kind)
{
	found.branches++;
	if (found.branch_file) {
		struct branch record = { .from = from, .to = to, .kind = kind };
		fwrite(&record, sizeof(record), 1, found.branch_file);
	}
}

static void hit(uint64_t value, uint64_t ip, uint64_t tsc)
{
	found.hits++;
	if (found.hit_file) {
		struct hit record = { found.branches, value, ip, tsc };
		fwrite(&record, sizeof(record), 1, found.hit_file);
	}
}

// The opcode behind the prefixes, its second byte and its ModRM.reg, which tell apart what libipt puts into one class.
struct opcode { uint8_t first, second, reg; };

static struct opcode opcode(const struct pt_insn *insn)
{
	static const char prefixes[] = "\x66\x67\xf2\xf3\x2e\x36\x3e\x26\x64\x65\xf0";
	unsigned int at = 0;
	while (at + 2 < insn->size && (memchr(prefixes, insn->raw[at], sizeof(prefixes) - 1) ||
				       (insn->mode == ptem_64bit && (insn->raw[at] & 0xf0) == 0x40)))
		at++;
	uint8_t second = at + 1 < insn->size ? insn->raw[at + 1] : 0;
	return (struct opcode){ insn->raw[at], second, second >> 3 & 7 };
}

static enum kind kind_of(const struct pt_insn *insn)
{
	struct opcode op = opcode(insn);
	switch (insn->iclass) {
	case ptic_cond_jump: return COND;
	case ptic_jump: return op.first == 0xff ? INDIRECT_JUMP : JUMP;
	case ptic_call: return op.first == 0xff ? INDIRECT_CALL : CALL;
	case ptic_return: return RETURN;
	case ptic_far_call: return op.first == 0x0f && (op.second == 0x05 || op.second == 0x34) ? SYSCALL : FAR_OTHER;
	case ptic_far_return:
		// IRET, SYSRET, SYSEXIT and UIRET; a far RET (CA, CB) is none of them.
		return op.first == 0xca || op.first == 0xcb ? FAR_OTHER : FAR_RETURN;
	default: return FAR_OTHER;
	}
}

// The walk: the last instruction, whose successor says whether it branched.
static struct pt_insn last;
static bool has_last, aborted;

// Whether the last instruction, which is gone to `ip` from, was a branch that was taken. (A conditional jump to the next
// instruction looks the same either way: counted as not taken.)
static void arrive(uint64_t ip)
{
	if (has_last && last.iclass != ptic_other && last.iclass != ptic_ptwrite && last.iclass != ptic_error &&
	    (last.iclass != ptic_cond_jump || ip != last.ip + last.size))
		branch(last.ip, ip, kind_of(&last));
	has_last = false;
}

static void take(const struct pt_event *event)
{
	bool has_ip = !event->ip_suppressed;
	if (event->type == ptev_ptwrite) {
		hit(event->variant.ptwrite.payload, has_ip ? event->variant.ptwrite.ip : 0,
		    event->has_tsc ? event->tsc : 0);
		return;
	}
	if (event->status_update || !walks_insns)
		return;
	switch (event->type) {
	case ptev_enabled:
		branch(0, event->variant.enabled.ip, TRACE_START);
		has_last = false;
		break;
	case ptev_disabled:
		if (has_last)
			branch(last.ip, has_ip ? event->variant.disabled.ip : 0, kind_of(&last));
		has_last = false;
		break;
	case ptev_async_disabled:
		arrive(event->variant.async_disabled.at);
		branch(event->variant.async_disabled.at, has_ip ? event->variant.async_disabled.ip : 0, INTERRUPT);
		break;
	case ptev_async_branch:
		arrive(event->variant.async_branch.from);
		branch(event->variant.async_branch.from, has_ip ? event->variant.async_branch.to : 0,
		       aborted ? TX_ABORT : INTERRUPT);
		aborted = false;
		break;
	case ptev_tsx:
		aborted = event->variant.tsx.aborted;
		break;
	case ptev_overflow:
		has_last = false;
		break;
	default:
		break;
	}
}

// Both decoders that walk code, behind one interface.
struct walker {
	void *decoder;
	int (*sync_forward)(void *);
	int (*sync_set)(void *, uint64_t);
	int (*offset)(const void *, uint64_t *);
	int (*sync_offset)(const void *, uint64_t *);
	int (*event)(void *, struct pt_event *);
	int (*step)(void *);
};

#define LAYER(layer, name)                                                                                           \
	static int layer##_sync_forward(void *decoder) { return pt_##layer##_sync_forward(decoder); }                    \
	static int layer##_sync_set(void *decoder, uint64_t at) { return pt_##layer##_sync_set(decoder, at); }           \
	static int layer##_offset(const void *decoder, uint64_t *at) { return pt_##layer##_get_offset(decoder, at); }    \
	static int layer##_sync_offset(const void *decoder, uint64_t *at)                                                \
	{                                                                                                                \
		return pt_##layer##_get_sync_offset(decoder, at);                                                            \
	}                                                                                                                \
	static int layer##_event(void *decoder, struct pt_event *event)                                                  \
	{                                                                                                                \
		return pt_##layer##_event(decoder, event, sizeof(*event));                                                   \
	}                                                                                                                \
	static int layer##_step(void *decoder);                                                                          \
	static void layer##_walk(const struct pt_config *config, struct pt_image *image)                                 \
	{                                                                                                                \
		struct pt_##name##_decoder *decoder = pt_##layer##_alloc_decoder(config);                                    \
		if (!decoder || pt_##layer##_set_image(decoder, image) < 0)                                                  \
			die("libipt", "no decoder");                                                                             \
		walk(&(struct walker){ decoder, layer##_sync_forward, layer##_sync_set, layer##_offset, layer##_sync_offset, \
				       layer##_event, layer##_step });                                                               \
		pt_##layer##_free_decoder(decoder);                                                                          \
	}

static void walk(const struct walker *walker);
LAYER(insn, insn)
LAYER(blk, block)

static int insn_step(void *decoder)
{
	struct pt_insn insn = { 0 };
	int status = pt_insn_next(decoder, &insn, sizeof(insn));
	if (insn.iclass != ptic_error) {
		found.insns++;
		arrive(insn.ip);
		last = insn;
		has_last = true;
	}
	return status;
}

static int blk_step(void *decoder)
{
	struct pt_block block = { 0 };
	int status = pt_blk_next(decoder, &block, sizeof(block));
	if (block.ninsn) {
		found.insns += block.ninsn;
		found.blocks++;
	}
	return status;
}

static int drain(const struct walker *walker, int status)
{
	while (status >= 0 && status & pts_event_pending) {
		struct pt_event event = { 0 };
		status = walker->event(walker->decoder, &event);
		if (status >= 0)
			take(&event);
	}
	return status;
}

// To the next PSB. Where libipt finds none that lies further on than the last, one is looked for in the bytes.
static int resync(const struct walker *walker, uint64_t *sync, bool first)
{
	static const uint8_t psb[16] = { 2, 0x82, 2, 0x82, 2, 0x82, 2, 0x82, 2, 0x82, 2, 0x82, 2, 0x82, 2, 0x82 };
	uint64_t now = 0;
	has_last = false;
	int status = walker->sync_forward(walker->decoder);
	if (status == -pte_eos)
		return status;
	if (!walker->sync_offset(walker->decoder, &now) && (first || now > *sync)) {
		*sync = now;
		return status;
	}
	while (*sync + sizeof(psb) < trace_size) {
		const uint8_t *next = memmem(trace + *sync + 1, trace_size - *sync - 1, psb, sizeof(psb));
		if (!next)
			break;
		*sync = next - trace;
		status = walker->sync_set(walker->decoder, *sync);
		if (status >= 0)
			return status;
		fault(*sync, pt_errcode(status));
	}
	return -pte_eos;
}

static void walk(const struct walker *walker)
{
	uint64_t sync = 0, before = 0, steps = 0;
	for (bool first = true;; first = false) {
		int status = resync(walker, &sync, first);
		while (status >= 0) {
			status = drain(walker, status);
			if (status < 0)
				break;
			if (status & pts_eos)
				return;
			status = walker->step(walker->decoder);
			if (++steps % STRIDE == 0) {
				uint64_t now = 0;
				walker->offset(walker->decoder, &now);
				if (now == before)
					status = -pte_internal;
				before = now;
			}
		}
		if (status == -pte_eos)
			return;
		uint64_t at = sync;
		walker->offset(walker->decoder, &at);
		fault(at, pt_errcode(status));
	}
}

static uint64_t with_last(uint64_t last_ip, const struct pt_packet_ip *ip)
{
	switch (ip->ipc) {
	case pt_ipc_suppressed: return last_ip;
	case pt_ipc_update_16: return (last_ip & ~UINT64_C(0xffff)) | ip->ip;
	case pt_ipc_update_32: return (last_ip & ~UINT64_C(0xffffffff)) | ip->ip;
	case pt_ipc_update_48: return (last_ip & ~UINT64_C(0xffffffffffff)) | ip->ip;
	case pt_ipc_sext_48: return (uint64_t)((int64_t)(ip->ip << 16) >> 16);
	default: return ip->ip;
	}
}

static void read_packets(const struct pt_config *config)
{
	struct pt_packet_decoder *decoder = pt_pkt_alloc_decoder(config);
	if (!decoder)
		die("packets", "no decoder");
	struct pt_packet packet;
	uint64_t last_ip = 0, value = 0;
	bool awaits_ip = false;
	int status = pt_pkt_sync_forward(decoder);
	while (status >= 0) {
		status = pt_pkt_next(decoder, &packet, sizeof(packet));
		if (status == -pte_eos)
			break;
		if (status < 0) {
			uint64_t at = 0;
			pt_pkt_get_offset(decoder, &at);
			fault(at, pt_errcode(status));
			// The search starts at the packet that could not be read, which is no PSB.
			status = pt_pkt_sync_forward(decoder);
			continue;
		}
		found.packets++;
		switch (packet.type) {
		case ppt_psb:
			last_ip = 0;
			break;
		case ppt_tip:
		case ppt_tip_pge:
		case ppt_tip_pgd:
			last_ip = with_last(last_ip, &packet.payload.ip);
			break;
		case ppt_fup:
			last_ip = with_last(last_ip, &packet.payload.ip);
			if (awaits_ip)
				hit(value, last_ip, 0);
			awaits_ip = false;
			break;
		case ppt_ptw:
			value = packet.payload.ptw.payload;
			awaits_ip = packet.payload.ptw.ip;
			if (!awaits_ip)
				hit(value, 0, 0);
			break;
		default:
			break;
		}
	}
	pt_pkt_free_decoder(decoder);
}

static void load(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	struct stat stat;
	if (fd < 0 || fstat(fd, &stat))
		die(path, strerror(errno));
	trace_size = stat.st_size;
	// Private and writable: libipt's types want it, nothing writes.
	trace = trace_size ? mmap(NULL, trace_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0) : (uint8_t *)"";
	if (trace == MAP_FAILED)
		die(path, strerror(errno));
	close(fd);
}

// PATH:FILE_OFFSET:SIZE:ADDRESS; a path may have colons of its own.
static void add_image(struct pt_image_section_cache *cache, struct pt_image *image, char *text)
{
	uint64_t number[3];
	for (int index = 2; index >= 0; index--) {
		char *colon = strrchr(text, ':'), *end;
		if (!colon)
			die(text, "not PATH:FILE_OFFSET:SIZE:ADDRESS");
		number[index] = strtoull(colon + 1, &end, 0);
		if (*end || end == colon + 1)
			die(text, "not a number");
		*colon = 0;
	}
	int id = pt_iscache_add_file(cache, text, number[0], number[1], number[2]);
	int status = id < 0 ? id : pt_image_add_cached(image, cache, id, NULL);
	if (status < 0)
		die(text, pt_errstr(pt_errcode(status)));
}

static double cpu_seconds(void)
{
	struct rusage usage;
	getrusage(RUSAGE_SELF, &usage);
	return usage.ru_utime.tv_sec + usage.ru_stime.tv_sec + (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

static FILE *output(const char *path)
{
	FILE *file = fopen(path, "wbe");
	if (!file)
		die(path, strerror(errno));
	setvbuf(file, NULL, _IOFBF, 1 << 20);
	return file;
}

static void finish(FILE *file)
{
	if (file && (ferror(file) || fclose(file)))
		die("output", "cannot be written");
}

static void report(const char *mode, double cpu)
{
	printf("{\"mode\": \"%s\", \"bytes\": %zu, \"insns\": %" PRIu64 ", \"blocks\": %" PRIu64 ", \"packets\": %" PRIu64
	       ", \"branches\": %" PRIu64 ", \"hits\": %" PRIu64 ", \"cpu_s\": %.6f, \"errors\": %" PRIu64
	       ", \"first_errors\": [",
	       mode, trace_size, found.insns, found.blocks, found.packets, found.branches, found.hits, cpu,
	       found.faults);
	for (uint64_t index = 0; index < found.faults && index < FAULTS; index++)
		printf("%s{\"offset\": %" PRIu64 ", \"error\": \"%s\"}", index ? ", " : "", found.fault[index].offset,
		       pt_errstr(found.fault[index].code));
	printf("]}\n");
}

int main(int argc, char **argv)
{
	if (argc < 3)
		die("usage", "ipt_driver blocks|insns|packets AUX [--image P:O:S:A]... [--branches OUT] [--hits OUT]");
	const char *mode = argv[1];
	struct pt_image_section_cache *cache = pt_iscache_alloc(NULL);
	struct pt_image *image = pt_image_alloc(NULL);
	// Sections stay mapped, and with them what the block decoder learnt of their code.
	if (!cache || !image || pt_iscache_set_limit(cache, UINT64_MAX) < 0)
		die("libipt", "out of memory");
	load(argv[2]);
	for (int index = 3; index + 1 < argc; index += 2) {
		if (!strcmp(argv[index], "--image"))
			add_image(cache, image, argv[index + 1]);
		else if (!strcmp(argv[index], "--branches"))
			found.branch_file = output(argv[index + 1]);
		else if (!strcmp(argv[index], "--hits"))
			found.hit_file = output(argv[index + 1]);
		else
			die(argv[index], "unknown option");
	}

	struct pt_config config;
	pt_config_init(&config);
	config.begin = trace;
	config.end = trace + trace_size;
	double begun = cpu_seconds();
	if (!strcmp(mode, "packets")) {
		read_packets(&config);
	} else if (!strcmp(mode, "insns")) {
		walks_insns = true;
		insn_walk(&config, image);
	} else if (!strcmp(mode, "blocks")) {
		blk_walk(&config, image);
	} else {
		die(mode, "not blocks, insns or packets");
	}
	finish(found.branch_file);
	finish(found.hit_file);
	report(mode, cpu_seconds() - begun);
	return 0;
}
