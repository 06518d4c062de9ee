/* SPDX-License-Identifier: Apache-2.0 */
#include "base64.h"

static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

char *base64_encode(const void *bytes, size_t n)
{
	const unsigned char *p = bytes;
	char *text = malloc((n + 2) / 3 * 4 + 1), *o = text;

	if (!text)
		return NULL;
	for (; n >= 3; n -= 3, p += 3) {
		*o++ = letters[p[0] >> 2];
		*o++ = letters[(p[0] & 3) << 4 | p[1] >> 4];
		*o++ = letters[(p[1] & 15) << 2 | p[2] >> 6];
		*o++ = letters[p[2] & 63];
	}
	if (n) {
		unsigned second = n == 2 ? p[1] : 0;

		*o++ = letters[p[0] >> 2];
		*o++ = letters[(p[0] & 3) << 4 | second >> 4];
		*o++ = n == 2 ? letters[(second & 15) << 2] : '=';
		*o++ = '=';
	}
	*o = '\0';
	return text;
}

static int value(char c)
{
	const char *p = c ? strchr(letters, c) : NULL;

	return p ? (int)(p - letters) : -1;
}

void *base64_decode(const char *text, size_t length, size_t *n, int *error)
{
	size_t pad = 0, made;
	unsigned char *bytes, *o;
	uint32_t group = 0;

	*error = -EINVAL;
	if (length % 4)
		return NULL;
	while (pad < 2 && pad < length && text[length - 1 - pad] == '=')
		pad++;
	made = length / 4 * 3 - pad;
	bytes = malloc(made + 1);
	if (!bytes) {
		*error = -ENOMEM;
		return NULL;
	}
	o = bytes;
	for (size_t i = 0; i < length; i++) {
		int v = i >= length - pad ? 0 : value(text[i]);

		if (v < 0) {
			free(bytes);
			return NULL;
		}
		group = group << 6 | (uint32_t)v;
		if (i % 4 != 3)
			continue;
		for (int byte = 2; byte >= 0; byte--)
			if (o < bytes + made)
				*o++ = (unsigned char)(group >> 8 * byte);
			else if ((unsigned char)(group >> 8 * byte)) {
				free(bytes);
				return NULL;
			}
		group = 0;
	}
	*n = made;
	return bytes;
}
